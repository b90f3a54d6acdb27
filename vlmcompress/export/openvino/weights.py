"""Constants of OpenVINO's graphs: tensors in their stored type, and integer weights with their scales.

A layer of 4 or 8 bits has the form that NNCF writes, which OpenVINO's plugins compute with directly:

    codes i4 | u4 | i8 | u8 [out, groups, size] -> f16 -> minus zero points -> times scales f16 -> [out, in] -> f32

Source: `ov::element` of OpenVINO 2026.4, `nncf/quantization/algorithms/weight_compression`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import torch
from openvino import opset13 as ops
from torch import Tensor

from vlmcompress.export.openvino.spec import Packed, ParameterSource

_TYPES = {torch.bfloat16: openvino.Type.bf16, torch.float16: openvino.Type.f16, torch.float32: openvino.Type.f32}


def constant(name: str, source: ParameterSource) -> Any:
    """The node of a parameter as float32; its constant is named by the memory name."""
    if layer := source.packed(name):
        return _quantized(layer, name)
    value = source.read(name)
    raw = value.contiguous().view(torch.uint8)
    return ops.convert(_constant(raw, value.shape, _TYPES[value.dtype], name), openvino.Type.f32)


def _quantized(layer: Packed, name: str) -> Any:
    """The node of a matrix of integers. Names of scales and zero points end in `_scale` and `_zero_point`."""
    fmt, (rows, columns) = layer.format, layer.shape
    groups = fmt.n_groups(columns)
    kind = getattr(openvino.Type, f"{'i' if fmt.symmetric else 'u'}{fmt.bits}")
    half, each = openvino.Type.f16, (1, 1, 1) if fmt.group == 0 else (rows, groups, 1)
    # Convert, subtract, multiply, reshape, in float16 and in this order: what NNCF writes, and plugins fold into their kernels.
    node = ops.convert(_constant(layer.tensors["weight"], (rows, groups, columns // groups), kind, name), half)
    if not fmt.symmetric:
        zero = _constant(layer.tensors["weight_zero_point"], each, kind, f"{name}_zero_point")
        node = ops.subtract(node, ops.convert(zero, half))
    scale = layer.tensors["weight_scale"].contiguous().view(torch.uint8)
    node = ops.multiply(node, _constant(scale, each, half, f"{name}_scale"))
    return ops.convert(ops.reshape(node, np.array(layer.shape), False), openvino.Type.f32)


def _constant(raw: Tensor, shape: Any, kind: openvino.Type, name: str) -> Any:
    """A constant of the bytes `raw`, which are copied."""
    data = raw.flatten().numpy()  # the constant does not keep it alive
    node = ops.constant(openvino.Tensor(data, openvino.Shape(list(shape)), kind), shared_memory=False)
    node.set_friendly_name(name)
    return node
