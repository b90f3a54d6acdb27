"""Weights rounded as a scheme says and stored in 16 bits again: what any engine reads, and llama.cpp's converter; nothing
gets smaller.

Stored per linear layer: `weight` [out, in], the codes times their scales, rounded to BF16, or to F16 where scales are that:
what an engine computes with that unpacks weights to 16 bits before it multiplies. Nothing says that activations be rounded,
and nothing tells such a weight from another: the format is written and not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmcompress.models.layer_names import Layers
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.utils.tensor_files import Spec

FORMAT = "bf16"
KV_SCALES = None
VOCABULARY = True


def storage(scheme: Scheme) -> str:
    """The name of the storage format of a scheme: any can be stored so."""
    return "dense"


def problems(layers: Layers) -> list[str]:
    """Reasons why the format cannot hold these layers in one checkpoint; empty if it can."""
    if not layers.kv_cache:
        return []
    return ["a checkpoint without quantized layers holds no scales of an FP8 KV cache; leave out kv_cache"]


def specs(scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
    """The weight's type and shape. Raises ValueError where the group size does not divide."""
    scheme.weights.n_groups(columns)
    return {"weight": Spec("F16" if dtype == "F16" else "BF16", (rows, columns))}


def tensors(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """Make the tensor that is stored for one linear layer."""
    return {"weight": qt.dequantize(torch.float16 if qt.scale.dtype == torch.float16 else torch.bfloat16)}


def configs(layers: Layers) -> dict[str, dict]:
    """No file says anything of the layers."""
    return {}
