"""NVFP4: 4-bit floats with a float8 scale for each 16 weights; mixed as published checkpoints for Blackwell are, or pure.

See `numerics` for the format. Layers that an engine fuses into one matrix share a global scale: vLLM takes the largest one of
them, which silently gives wrong results if they differ. Weights are rounded in one of three ways (`_rounded`). `four_over_six`
(arXiv 2512.02010) maps the largest value of a block to 4 instead of 6 where that reduces the error. The paper uses the global
scale `256 * 6 / max|W|`, so that every block can use 4; with compressed-tensors' 448, blocks whose largest value exceeds two
thirds of the matrix's cannot.

With `activations: 4` (W4A4) the engine rounds inputs the same way, with the calibrated global scale `448 * 6 / max|X|`; inputs
above the calibrated maximum saturate. With `16` inputs are not rounded: more accurate, but no faster arithmetic.

`mixed` uses NVFP4 for MLPs only, and FP8 (`fp8`) for attention (or the layers that replace it) and for the MLPs of the `last`
blocks, an eighth of all by default. This is the layout of NVIDIA's Qwen3.6-27B-NVFP4 (vllm-project/recipes, pull request 606:
MLPs NVFP4, attention and the KV cache FP8) and llm-compressor's recipe for Qwen3.8-27B (`examples/quantization_w4a4_fp4`: the
MLPs of the last 8 of 64 blocks in FP8, too).

vLLM computes W4A4 on Blackwell only; A100 and H100 dequantize the weights to 16 bits. This was not run on such a machine:
results were compared with vLLM's emulation of the kernel on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from vlmcompress.numerics import NVFP4, ActFormat, Scheme, find_global_scale
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes import _rounded
from vlmcompress.quantization.schemes._base import Needs, QuantizerOptions

_MLP = frozenset({"gate_up", "down", "fc1", "fc2"})
_LAST = 8  # one in this many blocks is among the last


@dataclass(frozen=True)
class Options(_rounded.Options):
    """`rounding`: "gptq", "awq" or "rtn"; `activations`: 4 (NVFP4) or 16 bits; `mixed`: FP8 for all but MLPs, and
    for the MLPs of the `last` blocks (null: an eighth of them); `four_over_six`: two scales to choose from for each block."""

    activations: int = 4
    mixed: bool = True
    last: int | None = None
    four_over_six: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.activations) is not int or self.activations not in (4, 16):
            raise ValueError(f"activations must be 4 or 16, got {self.activations!r}")
        for name in ("mixed", "four_over_six"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.last is not None and (type(self.last) is not int or self.last < 0):
            raise ValueError(f"last must be a whole number of blocks or null, got {self.last!r}")
        if self.last is not None and not self.mixed:
            raise ValueError("last applies to mixed only; set mixed true or leave last out")

    @property
    def max_code(self) -> float | None:
        """The code that the largest value of a block is mapped to; None: 6 or 4, whichever has the smaller error."""
        return None if self.four_over_six else NVFP4.qmax


class NvFp4(_rounded.Rounded[Options]):
    """The scheme `nvfp4`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "NVFP4": {"mixed": False, "activations": 4},
        "NVFP4A16": {"mixed": False, "activations": 16},
    }
    FORMAT = NVFP4

    @override
    def needs(self, options: Options) -> Needs:
        """The statistics that the rounding reads, and the maxima of inputs if these are rounded."""
        needs = super().needs(options)
        return replace(needs, statistics=needs.statistics | {"absmax"}) if options.activations == 4 else needs

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: NVFP4 weights, NVFP4 or 16-bit activations."""
        return Scheme(NVFP4, ActFormat("float", 4, dynamic=True) if options.activations == 4 else None)

    @override
    def other(self, group: str, layer: int, layers: int, options: Options) -> tuple[str, dict[str, Any]] | None:
        """FP8 for groups outside MLPs, and for the last blocks' MLPs; None: NVFP4."""
        last = -(-layers // _LAST) if options.last is None else options.last
        return ("fp8", {}) if options.mixed and (group not in _MLP or layer >= layers - last) else None

    @override
    def input_scale(self, stats: GroupStats | None, options: Options) -> Tensor | None:
        """The global scale `[1]`, float32, of inputs of every modality; None where inputs stay in 16 bits."""
        if options.activations != 4:
            return None
        assert stats is not None
        # Inputs beyond the maximum saturate, of any modality, so no balance is applied.
        return find_global_scale([stats.balanced("off").absmax()])


SCHEME = NvFp4()
