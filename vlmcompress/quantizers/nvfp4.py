"""NVFP4: 4-bit floats with a float8 scale for each 16 weights; mixed as published checkpoints for Blackwell are, or pure.

The format is that of `numerics`. What an engine makes one matrix of shares a global scale, as vLLM takes the largest of
several and is silently wrong otherwise. Weights are rounded to nearest (`rounding: rtn`), with GPTQ's error feedback (`gptq`,
which needs nothing of a format but scales fixed beforehand), or by AWQ's search for channel scales and clipped ranges (`awq`).
`four_over_six` (arXiv 2512.02010) puts the largest value of a block at 4 instead of 6 where that errs less. The paper takes
`256 * 6 / max|W|` for the global scale, so that 4 is open to every block; with compressed-tensors' 448 it is not to blocks
whose largest value exceeds two thirds of the matrix's.

`activations: 4` (W4A4) lets the engine round inputs the same way, relative to one number that is calibrated, `448 * 6 /
max|X|`; larger inputs than calibration saw saturate. `16` keeps inputs as they are: no faster arithmetic, and more accurate.

`mixed` gives NVFP4 to the MLPs alone, and FP8 (`fp8`) to attention, to what stands in its place, and to the MLPs of the `last`
blocks, an eighth of them by default. So are NVIDIA's Qwen3.6-27B-NVFP4 (vllm-project/recipes, pull request 606: MLPs NVFP4,
attention and the KV cache FP8) and llm-compressor's recipe for Qwen3.8-27B (`examples/quantization_w4a4_fp4`: the MLPs of the
last 8 of 64 blocks in FP8, too).

vLLM computes W4A4 on Blackwell only; A100 and H100 run the weights in 16 bits. Nothing of this was run on such a machine here:
results were compared with vLLM's emulation of the kernel on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import (
    NVFP4,
    ActFormat,
    QTensor,
    Scheme,
    find_global_scale,
    find_params,
    quantize_with,
    residual,
    round_to_nearest,
)
from vlmcompress.quantizers import awq, gptq
from vlmcompress.quantizers._base import Needs, QuantizerOptions
from vlmcompress.quantizers._columns import Feedback, propagated_error, quantize_columns
from vlmcompress.statistics.balance import check_balance
from vlmcompress.statistics.inputs import GroupStats

PREPARED_BY = ("rounding", "damp", "balance")
_READ = {"rtn": (), "gptq": ("gram",), "awq": ("gram", "absmean")}
_MLP = frozenset({"gate_up", "down", "fc1", "fc2"})
_LAST = 8  # one of so many blocks is among the last


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`activations`: 4 (NVFP4) or 16 bits; `mixed`: FP8 for all but MLPs, and for the MLPs of the `last` blocks (null: an
    eighth of them); `rounding`: "rtn", "gptq" or "awq"; `four_over_six`: two scales to choose from for each block; `damp`,
    `smooth`, `clip`, `clip_grid`, `sweeps`: as in gptq, whose rounding they belong to; `balance`: see `statistics.balance`."""

    activations: int = 4
    mixed: bool = True
    last: int | None = None
    rounding: str = "gptq"
    four_over_six: bool = True
    damp: float = 0.01
    smooth: Any = "off"  # YAML reads a bare `off` as False
    clip: bool = False
    clip_grid: int = 20
    sweeps: int = 0
    balance: Any = "off"

    def __post_init__(self) -> None:
        object.__setattr__(self, "balance", check_balance(self.balance))
        if type(self.activations) is not int or self.activations not in (4, 16):
            raise ValueError(f"activations must be 4 or 16, got {self.activations!r}")
        for name in ("mixed", "four_over_six"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.last is not None and (type(self.last) is not int or self.last < 0):
            raise ValueError(f"last must be a whole number of blocks or null, got {self.last!r}")
        if self.last is not None and not self.mixed:
            raise ValueError("last is for the blocks that mixed gives FP8; set mixed true or leave last out")
        if self.rounding not in _READ:
            raise ValueError(f"rounding must be 'rtn', 'gptq' or 'awq', got {self.rounding!r}")
        object.__setattr__(self, "smooth", "off" if self.smooth is False else self.smooth)
        _ = self.feedback  # checks damp and the steps
        if self.rounding != "gptq" and (self.smooth != "off" or self.clip or self.sweeps):
            raise ValueError(f"smooth, clip and sweeps are for rounding 'gptq', got rounding {self.rounding!r}")

    @property
    def feedback(self) -> gptq.Options:
        """The options that gptq has as well."""
        return gptq.Options(damp=self.damp, **self.steps)

    @property
    def steps(self) -> dict[str, Any]:
        """The steps around feedback, options of gptq."""
        return {name: getattr(self, name) for name in ("smooth", "clip", "clip_grid", "sweeps")}

    @property
    def max_code(self) -> float | None:
        """The code at which the largest value of a block is put; None: 6 or 4, whichever errs less."""
        return None if self.four_over_six else NVFP4.qmax


@dataclass(frozen=True)
class Prepared:
    """What the layers of a group share: the global scale `[1]`, GPTQ's feedback, the Gram matrix for clipping; warnings."""

    global_scale: Tensor
    feedback: Feedback | None
    gram: Tensor | None
    warnings: tuple[tuple[str, str], ...] = ()


def needs(options: Options) -> Needs:
    """What the rounding reads, and the maxima of inputs where these are rounded."""
    rounding = options.rounding if options.smooth == "off" else "awq"
    return Needs(frozenset(_READ[rounding]) | ({"absmax"} if options.activations == 4 else set()))


def scheme(options: Options) -> Scheme:
    """Number formats: NVFP4 weights, NVFP4 or 16-bit activations."""
    return Scheme(NVFP4, ActFormat("float", 4, dynamic=True) if options.activations == 4 else None)


def other(group: str, layer: int, layers: int, options: Options) -> tuple[str, dict[str, Any]] | None:
    """FP8 for what is no MLP, and for the last blocks' MLPs; None: NVFP4."""
    last = -(-layers // _LAST) if options.last is None else options.last
    return ("fp8", {}) if options.mixed and (group not in _MLP or layer >= layers - last) else None


def smooth(
    weights: list[Tensor], stats: GroupStats | None, options: Options, scale_dtype: torch.dtype = torch.bfloat16
) -> Tensor | None:
    """AWQ's best scale `[in]` for the weights `[out_i, in]` that share an input; None where the options ask for none."""
    if stats is None or (options.rounding != "awq" and options.smooth == "off"):
        return None
    scales = awq.candidates(weights, stats, awq.Options(group_size=NVFP4.group))
    if options.smooth == "feedback":
        return gptq.least_left(weights, scales, gptq.residues(stats, scales, options.feedback), NVFP4, scale_dtype)
    return awq.least_error(weights, scales, stats.gram(), NVFP4, scale_dtype, options.max_code)


def prepare(weights: list[Tensor], stats: GroupStats | None, options: Options) -> Prepared:
    """Find the group's global scale, and what its rounding needs of the Gram matrix."""
    shared = find_global_scale(weights)
    if options.rounding == "gptq":
        assert stats is not None
        feedback = gptq.prepare(weights, stats, options.feedback)
        return Prepared(shared, feedback, None, feedback.warnings)
    return Prepared(shared, None, stats.gram() if options.rounding == "awq" and stats else None)


def quantize(
    weight: Tensor,
    stats: GroupStats | None,
    options: Options,
    scale_dtype: torch.dtype,
    prepared: Prepared | None = None,
) -> QTensor:
    """Round `weight [out, in]`, smoothed already."""
    return quantize_group([weight], stats, options, scale_dtype, prepared)[0]


def quantize_group(
    weights: list[Tensor],
    stats: GroupStats | None,
    options: Options,
    scale_dtype: torch.dtype,
    prepared: Prepared | None = None,
) -> list[QTensor]:
    """Round the weights `[out_i, in]` of a group, which share a global scale."""
    ready = prepare(weights, stats, options) if prepared is None else prepared
    kwargs: dict[str, Any] = {"max_code": options.max_code, "global_scale": ready.global_scale}
    if ready.feedback is not None and stats is not None:
        params = [_params(w, ready.feedback, stats, options, ready.global_scale) for w in weights]
        kwargs = {"sweeps": options.sweeps, "global_scale": ready.global_scale}
        return quantize_columns(weights, ready.feedback, params, NVFP4, **kwargs)
    if ready.gram is not None:
        steps = awq.Options().clip_grid
        clipped = [awq.clipped(w, ready.gram, NVFP4, steps, **kwargs) for w in weights]
        return [quantize_with(w, *each, NVFP4, ready.global_scale) for w, each in zip(weights, clipped, strict=True)]
    return [round_to_nearest(w, NVFP4, **kwargs) for w in weights]


def sketch(
    weight: Tensor,
    stats: GroupStats | None,
    options: Options,
    scale_dtype: torch.dtype,
    prepared: Prepared | None = None,
) -> Tensor:
    """Estimate the error `q - w [out, in]` that `quantize` makes; GPTQ's as `gptq.sketch` does."""
    ready = prepare([weight], stats, options) if prepared is None else prepared
    if ready.feedback is None or stats is None:
        return quantize(weight, stats, options, scale_dtype, ready).dequantize(torch.float32).sub_(weight)
    params = _params(weight, ready.feedback, stats, options, ready.global_scale)
    return propagated_error(residual(weight, *params, NVFP4).neg_(), ready.feedback)


def _params(
    weight: Tensor, feedback: Feedback, stats: GroupStats, options: Options, global_scale: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Scales of `weight [out, in]` before GPTQ's feedback."""
    if options.clip:
        return gptq.ranges(weight, feedback, stats, NVFP4, options, global_scale=global_scale)
    return find_params(
        weight, NVFP4, importance=stats.importance(), max_code=options.max_code, global_scale=global_scale
    )


def input_scale(stats: GroupStats | None, options: Options) -> Tensor | None:
    """The global scale `[1]`, float32, of inputs of every modality; None where inputs stay in 16 bits."""
    if options.activations != 4:
        return None
    assert stats is not None
    return find_global_scale([stats.balanced("off").absmax()])
