"""Constants of OpenVINO's graphs: tensors in the type that they are stored in, and integer weights with their scales.

A layer of 4 or 8 bits is what NNCF writes, and what OpenVINO's plugins compute with without unpacking it first:

    codes i4 | u4 | i8 | u8 [out, groups, size] -> f16 -> minus zero points -> times scales f16 -> [out, in] -> f32

Source: `ov::element` of OpenVINO 2026.4, `nncf/quantization/algorithms/weight_compression`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino
import torch
from openvino import opset13 as ops
from torch import Tensor

from vlmcompress.numerics import Format

_TYPES = {torch.bfloat16: openvino.Type.bf16, torch.float16: openvino.Type.f16, torch.float32: openvino.Type.f32}


def dense(value: Tensor, name: str) -> Any:
    """The node of a tensor that is not quantized, as float32. `name`: what the constant is called."""
    raw = value.contiguous().view(torch.uint8)
    return ops.convert(_constant(raw, value.shape, _TYPES[value.dtype], name), openvino.Type.f32)


def quantized(tensors: Mapping[str, Tensor], fmt: Format, shape: tuple[int, int], name: str) -> Any:
    """The node of a matrix `[out, in]` of integers, as float32.

    Args:
        tensors: what `exporters.openvino.tensors` made.
        name: what the constant of the codes is called; scales and zero points are called so with `_scale`, `_zero_point`.
    """
    rows, columns = shape
    groups = fmt.n_groups(columns)
    kind = getattr(openvino.Type, f"{'i' if fmt.symmetric else 'u'}{fmt.bits}")
    half, each = openvino.Type.f16, (1, 1, 1) if fmt.group == 0 else (rows, groups, 1)
    node = ops.convert(_constant(tensors["weight"], (rows, groups, columns // groups), kind, name), half)
    if not fmt.symmetric:
        zero = _constant(tensors["weight_zero_point"], each, kind, f"{name}_zero_point")
        node = ops.subtract(node, ops.convert(zero, half))
    scale = tensors["weight_scale"].contiguous().view(torch.uint8)
    node = ops.multiply(node, _constant(scale, each, half, f"{name}_scale"))
    return ops.convert(ops.reshape(node, np.array(shape), False), openvino.Type.f32)


def _constant(raw: Tensor, shape: Any, kind: openvino.Type, name: str) -> Any:
    """A constant of the bytes `raw`, which are copied."""
    data = raw.flatten().numpy()  # not kept alive by what is made of it
    node = ops.constant(openvino.Tensor(data, openvino.Shape(list(shape)), kind), shared_memory=False)
    node.set_friendly_name(name)
    return node
