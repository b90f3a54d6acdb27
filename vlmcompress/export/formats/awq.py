"""AutoAWQ's GEMM format: 4-bit weights, with zero points or without.

Stored per linear layer (`out` x `in`, g = number of scales per row), everything transposed:

| tensor | type and shape | content |
|---|---|---|
| `qweight` | i32 [in, out/8] | codes from 0 to 15, eight neighbours along `out` per word |
| `qzeros` | i32 [g, out/8] | zero points from 0 to 15, packed the same way; 8 for symmetric weights |
| `scales` | f16 [g, out] | |

Bits 4i to 4i + 3 of word c hold column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i], and `w = (q - z) * s`. Bits and group size are the
same in the whole checkpoint. AutoAWQ was discontinued in 2025; engines still read its files.
Sources: AutoAWQ `awq/modules/linear/gemm.py`, vLLM 0.32 `quantization/auto_awq.py`, SGLang, LMDeploy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.export.formats._base import Reader, Writer
from vlmcompress.export.packing import parts, to_float16
from vlmcompress.models.layer_names import Layers, Names
from vlmcompress.models.quantization_keys import INTEGERS, IRRELEVANT, require_known_keys
from vlmcompress.numerics import Format, QTensor, Scheme
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Spec

GROUPS = (-1, 32, 64, 128)
# columns in the halves of a word's bytes: its kernel unpacks pairs of 16-bit floats
_PAIRS = ((0, 2), (4, 6), (1, 3), (5, 7))


def _packed(codes: Tensor) -> Tensor:
    """Pack int8 codes `[out, n]` into int32 words `[n, out / 8]`: whole rows at a time, two to a byte."""
    rows = codes.contiguous().view(torch.uint8).view(-1, 8, codes.shape[1])
    packed = torch.empty(len(rows), 4, codes.shape[1], dtype=torch.uint8, device=codes.device)
    for part in parts(codes, len(rows), 8 * codes.shape[1]):
        for byte, (low, high) in enumerate(_PAIRS):
            packed[part, byte] = ((rows[part, low] & 15) | (rows[part, high] << 4)) ^ 0x88  # adds 8 to both, modulo 16
    return packed.view(-1, codes.shape[1]).T.reshape(-1).view(torch.int32).view(codes.shape[1], -1)


def _unpacked(words: Tensor) -> Tensor:
    """The int8 codes `[out, n]` in words `[n, out / 8]`: the inverse of `_packed`."""
    packed = words.contiguous().view(torch.uint8).T.contiguous().view(-1, 4, len(words))
    codes = torch.empty(len(packed), 8, len(words), dtype=torch.uint8, device=words.device)
    for part in parts(words, len(packed), 8 * len(words)):
        for byte, (low, high) in enumerate(_PAIRS):
            codes[part, low] = (packed[part, byte] & 15) - 8
            codes[part, high] = (packed[part, byte] >> 4) - 8
    return codes.view(torch.int8).view(-1, len(words))


class Awq(Writer, Reader):
    """The variant `gemm`, which engines read."""

    METHOD = "awq"

    @override
    def storage(self, scheme: Scheme) -> str:
        weights = scheme.weights
        if scheme.activations is not None or weights.kind != "int" or weights.bits != 4:
            raise UserError(
                "AutoAWQ files hold 4-bit integer weights with 16-bit activations only; write compressed-tensors"
            )
        if weights.group not in GROUPS:
            raise UserError(
                f"AutoAWQ files have groups of 32, 64 or 128, or -1 (one scale per row), not {weights.group}"
            )
        return "gemm"

    @override
    def problems(self, layers: Layers) -> list[str]:
        several = "AutoAWQ files have one scheme for all quantized layers, this checkpoint has several"
        reasons = [f"{several}; write compressed-tensors"] if len(layers.schemes) > 1 else []
        return reasons + super().problems(layers)

    @override
    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        self.storage(scheme)
        if rows % 8:
            raise ValueError(f"{rows} outputs do not fill whole words of 8, which AutoAWQ files consist of")
        groups = scheme.weights.n_groups(columns)
        return {
            "qweight": Spec("I32", (columns, rows // 8)),
            "qzeros": Spec("I32", (groups, rows // 8)),
            "scales": Spec("F16", (groups, rows)),
        }

    @override
    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        zero = torch.zeros(qt.scale.shape, dtype=torch.int8) if qt.zero_point is None else qt.zero_point
        return {
            "qweight": _packed(qt.q),
            "qzeros": _packed(zero),
            "scales": to_float16(qt.scale, "AutoAWQ").T.contiguous(),
        }

    @override
    def configs(self, layers: Layers) -> dict[str, dict]:
        """`modules_to_not_convert` lists every part in 16 bits by all of its names: vLLM, SGLang and transformers search for
        an entry in a layer's name, LMDeploy's PyTorch engine for the layer's name in an entry."""
        if not layers.schemes:
            return {}
        weights = layers.schemes[0].weights
        block = {
            "quant_method": self.METHOD,
            "version": "gemm",
            "bits": 4,
            "group_size": weights.group,
            "zero_point": True,
            "sym": weights.symmetric,
            "modules_to_not_convert": list(dict.fromkeys(name for kept in layers.kept for name in kept.names)),
        }
        return {"config.json": block}

    @override
    def require_supported(self, config: Mapping) -> None:
        read = {"version", "format", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "sym"}
        only = {**INTEGERS, "desc_act": (False,), "checkpoint_format": ("gemm",)}
        dynamic = config.get("dynamic") or {}
        # `dynamic` may only exclude layers
        excepted = {"dynamic"} if all(str(pattern).startswith("-:") for pattern in dynamic) else set()
        require_known_keys(config, read | excepted, IRRELEVANT | {"modules_to_not_convert", "lm_head"}, only)

    @override
    def scheme_in(
        self, config: Mapping, names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]
    ) -> Scheme | None:
        if "qweight" not in stored:
            return None
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        bits = config.get("bits", config.get("w_bit"))
        group = config.get("group_size", config.get("q_group_size"))
        if version != "gemm" or bits != 4 or type(group) is not int:
            raise UserError(
                f"of AutoAWQ's formats, only 'gemm' with 4 bits is read; this is {version!r}, {bits!r} bits, group {group!r}"
            )
        symmetric = bool(config.get("sym", False)) or config.get("zero_point") is False
        return Scheme(Format("int", 4, group, symmetric))

    @override
    def quantizes(self, config: Mapping, name: str) -> bool:
        """Whether an engine takes the linear layer `name` for quantized: no entry occurs in its name."""
        return not any(entry in name for entry in config.get("modules_to_not_convert") or ())

    @override
    def read(self, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> tuple[QTensor, None]:
        zero = _unpacked(stored["qzeros"])
        if scheme.weights.symmetric and zero.any():
            raise UserError("the config says symmetric weights, but not all zero points are 8; correct the config")
        codes, zero_point = _unpacked(stored["qweight"]), None if scheme.weights.symmetric else zero
        return QTensor(codes, stored["scales"].T.contiguous(), zero_point, scheme.weights), None


FORMAT = Awq()
