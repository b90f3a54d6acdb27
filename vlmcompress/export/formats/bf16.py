"""Weights rounded by a scheme and dequantized to 16 bits, which any engine and llama.cpp's converter read; nothing gets
smaller.

Stored per linear layer: `weight` [out, in], the codes times their scales, rounded to BF16, or to F16 if the scales are F16.
These are the values of engines that dequantize weights to 16 bits before the product. Activations are not rounded, and such
weights cannot be recognized, so this format can only be written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmcompress.models.layer_names import Layers
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.utils.tensor_headers import Spec

FORMAT = "bf16"
KV_SCALES = None
VOCABULARY = True


def storage(scheme: Scheme) -> str:
    """The name of the storage format; every scheme can be stored this way."""
    return "dense"


def problems(layers: Layers) -> list[str]:
    """Reasons why the format cannot hold these layers in one checkpoint; empty if it can."""
    if not layers.kv_cache:
        return []
    return ["a checkpoint without quantized layers holds no scales of an FP8 KV cache; leave out kv_cache"]


def specs(scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
    """The weight's type and shape. Raises ValueError if the group size does not divide the columns."""
    scheme.weights.n_groups(columns)
    return {"weight": Spec("F16" if dtype == "F16" else "BF16", (rows, columns))}


def tensors(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """The tensor stored for one linear layer."""
    return {"weight": qt.dequantize(torch.float16 if qt.scale.dtype == torch.float16 else torch.bfloat16)}


def configs(layers: Layers) -> dict[str, dict]:
    """Empty: no file has settings of the layers."""
    return {}
