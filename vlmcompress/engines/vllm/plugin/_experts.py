"""Experts with 4-bit weights in vLLM's CPU build where the processor has no AMX: slow, and only when it is asked for.

vLLM 0.32 has kernels for quantized experts on x86 for processors with AMX only. For GPUs it has an emulation that
dequantizes them when they are loaded and computes with 16-bit weights (`fused_moe/experts/int4_emulation_moe.py`, in
Triton). Here the same is done for CPUs: vLLM's own class reads config and files and lays the weights out, they are
dequantized, and its kernel for unquantized experts computes. Memory is that of 16-bit weights: it is a way to check a
checkpoint, not to serve one.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "VLMCOMPRESS_EMULATE_EXPERTS"
_put: list[bool] = []


def emulate_experts() -> None:
    """Let vLLM's CPU build compute experts with packed weights where the environment asks for it
    (`VLMCOMPRESS_EMULATE_EXPERTS=1`)."""
    if os.environ.get(VARIABLE) != "1":
        return
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16,
    )
    from vllm.platforms import current_platform

    module: Any = compressed_tensors_moe_wna16
    if current_platform.is_cpu() and not _put:
        module.CompressedTensorsWNA16MoEMethod = _emulated(module.CompressedTensorsWNA16MoEMethod)
        _put.append(True)


def _emulated(original: Any) -> Any:
    """vLLM's class with `original`'s reading of a checkpoint, and 16-bit weights once it is read."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    def dequantized(layer: Any, name: str, bits: int) -> torch.Tensor:
        """The weights `[experts, out, in]` that codes, scales and zero points of a layer stand for."""
        packed, scale = getattr(layer, f"{name}_weight_packed"), getattr(layer, f"{name}_weight_scale")
        experts, rows, groups = scale.shape
        columns = packed.shape[2] * 32 // bits
        zero = getattr(layer, f"{name}_weight_zero_point", None)
        found = torch.empty(experts, rows, columns, dtype=scale.dtype)
        for index in range(experts):
            codes = unpack_from_int32(packed[index], bits, torch.Size([rows, columns]))
            codes = codes.reshape(rows, groups, -1).to(scale.dtype)
            if zero is not None:
                codes -= unpack_from_int32(zero[index], bits, torch.Size([rows, groups]), packed_dim=0)[..., None]
            found[index] = (codes * scale[index, :, :, None]).reshape(rows, columns)
        return found

    class Emulated(original):
        def __init__(self, weight_quant: Any, input_quant: Any, moe: Any, layer_name: str | None = None):
            super(original, self).__init__(moe)
            self.weight_quant, self.input_quant = weight_quant, input_quant
            self.symmetric, self.num_bits = weight_quant.symmetric, weight_quant.num_bits
            self.packed_factor, self.strategy = 32 // weight_quant.num_bits, weight_quant.strategy
            self.group_size = -1 if weight_quant.group_size is None else weight_quant.group_size
            self.plain = UnquantizedFusedMoEMethod(moe)

        def process_weights_after_loading(self, layer: Any) -> None:
            for name in ("w13", "w2"):
                weight = dequantized(layer, name, self.num_bits)
                for part in ("packed", "scale", "zero_point", "shape"):
                    layer._parameters.pop(f"{name}_weight_{part}", None)
                layer.register_parameter(f"{name}_weight", torch.nn.Parameter(weight, requires_grad=False))
            self.plain.process_weights_after_loading(layer)
            self.moe_kernel = self.plain.moe_kernel

        def get_fused_moe_quant_config(self, layer: Any) -> Any:
            return self.plain.get_fused_moe_quant_config(layer)

        def apply(self, *args: Any, **options: Any) -> Any:
            return self.plain.apply(*args, **options)

        @property
        def is_monolithic(self) -> bool:
            return bool(self.plain.is_monolithic)

    return Emulated
