"""The common parts of GPTQ's two formats.

Stored per linear layer (`out` x `in`, b bits, g = number of scales per row), everything transposed:

| tensor | type and shape | content |
|---|---|---|
| `qweight` | i32 [in*b/32, out] | codes plus 2^(b-1), packed in order along `in` |
| `qzeros` | i32 [g, out*b/32] | zero points plus 2^(b-1), minus 1 in v1, packed along `out` |
| `scales` | f16 [g, out] | |
| `g_idx` | i32 [in] | the group of each input, here always ascending |

`w = (q - z) * s`. Layers with another scheme than most, and parts in 16 bits, are listed in `dynamic`: patterns that engines
match from the start of a layer's name. Sources: AutoGPTQ `qlinear_cuda.py`, GPTQModel's `dynamic`, vLLM 0.32
`quantization/auto_gptq.py` and `utils/gptq_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.export.formats._base import Reader, Writer
from vlmcompress.export.packing import pack_words, to_float16, unpack_words
from vlmcompress.models.layer_names import Layers, Names
from vlmcompress.models.quantization_keys import INTEGERS, IRRELEVANT, require_known_keys
from vlmcompress.numerics import Format, QTensor, Scheme
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Spec

# vLLM's names of fused matrices.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def _numbers(scheme: Scheme) -> dict[str, Any]:
    fmt = scheme.weights
    return {"bits": fmt.bits, "group_size": fmt.group, "sym": fmt.symmetric}


def _pattern(modules: Iterable[Names], whole: bool = False) -> str:
    """One pattern for modules by all their names, including fused ones; `whole`: also for everything below them."""
    forms: dict[str, None] = {}
    for name in (name for names in modules for name in names):
        parent, _, last = name.rpartition(".")
        forms |= dict.fromkeys((name, f"{parent}.{_FUSED.get(last, last)}"))
    return f"(?:{'|'.join(map(re.escape, forms))})" + (r"(?:\..*)?$" if whole else "$")


def _group_index(columns: int, fmt: Format) -> Tensor:
    """The group of each input."""
    return (torch.arange(columns) // (fmt.group if fmt.group > 0 else columns)).to(torch.int32)


class GptqFiles(Writer, Reader):
    """Both formats. `OFFSET` is subtracted from stored zero points, `VERSION` is the value of `checkpoint_format`."""

    OFFSET: ClassVar[int]
    VERSION: ClassVar[str]

    @override
    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        bits = scheme.weights.bits
        for side, what in ((rows, "outputs"), (columns, "inputs")):
            if side * bits % 32:
                raise ValueError(
                    f"{side} {what} do not fill whole 32-bit words with {bits} bits, which GPTQ files consist of"
                )
        groups = scheme.weights.n_groups(columns)
        return {
            "qweight": Spec("I32", (columns * bits // 32, rows)),
            "qzeros": Spec("I32", (groups, rows * bits // 32)),
            "scales": Spec("F16", (groups, rows)),
            "g_idx": Spec("I32", (columns,)),
        }

    @override
    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        bits, columns = scheme.weights.bits, qt.q.shape[1]
        zero = torch.zeros(qt.scale.shape, dtype=torch.int8) if qt.zero_point is None else qt.zero_point
        return {
            "qweight": pack_words(qt.q, bits).T.contiguous(),
            "qzeros": pack_words(zero.T - self.OFFSET, bits),
            "scales": to_float16(qt.scale, "GPTQ").T.contiguous(),
            "g_idx": _group_index(columns, scheme.weights),
        }

    @override
    def quantizes(self, config: Mapping, name: str) -> bool:
        """Whether an engine takes the linear layer `name` for quantized: no pattern of exceptions matches its beginning."""
        excluded = (pattern[2:] for pattern in config.get("dynamic") or () if pattern.startswith("-:"))
        return not any(re.match(pattern, name) for pattern in excluded)

    @override
    def read(
        self, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
    ) -> tuple[QTensor, Tensor | None]:
        fmt = scheme.weights
        q = unpack_words(stored["qweight"].T, fmt.bits, shape[1])
        if "g_idx" in stored and not torch.equal(stored["g_idx"].to(torch.int32), _group_index(q.shape[1], fmt)):
            raise UserError(
                "its inputs are not in the order of groups (desc_act), which engines no longer support; quantize again"
            )
        # v1 stores z - 1 modulo 2^b, so that a zero point of 0 wraps to the largest code and is read as 2^b.
        zero = unpack_words(stored["qzeros"], fmt.bits, shape[0]).int() + self.OFFSET
        if zero.max() > fmt.qmax:
            raise UserError(
                "a zero point is out of the codes' range, which other formats cannot hold; quantize the original"
            )
        if fmt.symmetric and zero.any():
            raise UserError(
                "the config says symmetric weights, but their zero points are not in the middle; correct the config"
            )
        zero = zero.T.to(torch.int8).contiguous()
        return QTensor(q, stored["scales"].T.contiguous(), None if fmt.symmetric else zero, fmt), None

    @override
    def configs(self, layers: Layers) -> dict[str, dict]:
        """The `quantization_config` block of config.json, and the same where GPTQModel looks for it."""
        if not layers.schemes:
            return {}
        first, *others = layers.schemes
        dynamic: dict[str, dict] = {}
        for scheme in others:
            names = [layer for layer, of_layer in layers.quantized.items() if of_layer == scheme]
            dynamic[f"+:{_pattern(names)}"] = _numbers(scheme)
        for kept in layers.kept:  # MTP heads get the pattern of published checkpoints
            dynamic[f"-:.*{kept.names[0]}.*" if kept.mtp else f"-:{_pattern([kept.names], kept.whole)}"] = {}
        block = {
            "quant_method": "gptq",
            "checkpoint_format": self.VERSION,
            **_numbers(first),
            "desc_act": False,
            "lm_head": False,
            "dynamic": dynamic,
        }
        return {"config.json": block, "quantize_config.json": block}

    @override
    def require_supported(self, config: Mapping) -> None:
        only: dict[str, Any] = {**INTEGERS, "is_marlin_format": (False,)}
        only |= dict.fromkeys(("format", "checkpoint_format"), ("gptq", "gptq_v2"))
        numbers = {"bits", "group_size", "sym", "desc_act"}
        require_known_keys(config, numbers | {"dynamic"}, IRRELEVANT | {"lm_head"}, only)
        for pattern, changes in (config.get("dynamic") or {}).items():
            if not str(pattern).startswith("-:"):
                require_known_keys(changes, numbers, IRRELEVANT, INTEGERS, f"dynamic.{pattern}.")

    @override
    def scheme_in(
        self, config: Mapping, names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]
    ) -> Scheme | None:
        if "qweight" not in stored:
            return None
        numbers: dict[str, Any] = dict(config)
        for pattern, changes in (config.get("dynamic") or {}).items():
            try:
                if not pattern.startswith("-:") and any(re.match(pattern.removeprefix("+:"), name) for name in names):
                    numbers |= changes
                    break
            except re.error as error:
                raise UserError(f"dynamic has {pattern!r}, which is not a regular expression ({error})") from error
        if numbers.get("desc_act") and "g_idx" not in stored:
            raise UserError("the config says desc_act, but g_idx, the order of inputs, is missing; download it again")
        bits, group, symmetric = (numbers.get(key) for key in ("bits", "group_size", "sym"))
        if bits not in (2, 4, 8) or type(group) is not int or not isinstance(symmetric, bool):
            raise UserError(
                "only GPTQ files of 2, 4 or 8 bits are read; the config has "
                f"bits {bits!r}, group_size {group!r}, sym {symmetric!r}"
            )
        return Scheme(Format("int", bits, group, symmetric))
