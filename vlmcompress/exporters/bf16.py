"""Weights rounded as a scheme says and stored in 16 bits again: what any engine reads, and llama.cpp's converter; nothing
gets smaller.

Stored per linear layer: `weight` [out, in], the codes times their scales, rounded to BF16, or to F16 where scales are that:
what an engine computes with that unpacks weights to 16 bits before it multiplies. Nothing says that activations be rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vlmcompress.common.layer_names import Layers, Names
from vlmcompress.common.tensor_files import Spec
from vlmcompress.numerics import QTensor, Scheme

FORMAT = "bf16"
KV_SCALES = None


def storage(scheme: Scheme) -> str:
    """The name of the storage format of a scheme: any can be stored so."""
    return "dense"


def problems(layers: Layers) -> list[str]:
    """Reasons why the format cannot hold these layers in one checkpoint; empty if it can."""
    if not layers.kv_cache:
        return []
    return ["a checkpoint without quantized layers holds no scales of an FP8 KV cache; leave out kv_cache"]


def shapes(scheme: Scheme, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Local names and shapes of the tensors stored for a layer of `rows` outputs and `columns` inputs."""
    scheme.weights.n_groups(columns)
    return {"weight": (rows, columns)}


def specs(scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
    """Local names, types and shapes of the tensors stored for a layer; `dtype`: safetensors' name of that of its scales."""
    kept = "F16" if dtype == "F16" else "BF16"
    return {name: Spec(kept, shape) for name, shape in shapes(scheme, rows, columns).items()}


def layout(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Spec]:
    """Local names, types and shapes of the tensors that `tensors` returns, without computing them."""
    return specs(scheme, qt.q.shape[0], qt.q.shape[1], Spec.of(qt.scale).dtype)


def tensors(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """Make the tensor that is stored for one linear layer."""
    return {"weight": qt.dequantize(torch.float16 if qt.scale.dtype == torch.float16 else torch.bfloat16)}


def config(layers: Layers) -> dict:
    """The `quantization_config` block of config.json: none."""
    return {}


def files(layers: Layers) -> dict[str, dict]:
    """Further JSON files of the checkpoint: none."""
    return {}


def scheme_in(config: Mapping, names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]) -> Scheme | None:
    """The scheme of a linear layer: none, nothing tells these weights from others."""
    return None


def takes(config: Mapping, name: str) -> bool:
    """Whether an engine takes the linear layer called `name` for quantized: none is."""
    return False


def read(stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> tuple[QTensor, Tensor | None]:
    """Nothing can be read back. Raises ValueError."""
    raise ValueError("weights stored in 16 bits have no codes")
