"""Weights rounded by a scheme and dequantized to 16 bits, which any engine and llama.cpp's converter read; nothing gets
smaller.

Stored per linear layer: `weight` [out, in], the codes times their scales, rounded to BF16, or to F16 if the scales are F16.
These are the values of engines that dequantize weights to 16 bits before the product. Activations are not rounded, and such
weights cannot be recognized, so this format can only be written.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.export.formats._base import Writer
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.utils.tensor_headers import Spec


class Bf16(Writer):
    """Plain weights, which have no settings."""

    METHOD = "bf16"
    VOCABULARY = True

    @override
    def storage(self, scheme: Scheme) -> str:
        return "dense"

    @override
    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        scheme.weights.n_groups(columns)
        return {"weight": Spec("F16" if dtype == "F16" else "BF16", (rows, columns))}

    @override
    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        return {"weight": qt.dequantize(torch.float16 if qt.scale.dtype == torch.float16 else torch.bfloat16)}


FORMAT = Bf16()
