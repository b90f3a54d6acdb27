"""A plugin of vLLM for tests, with kernels that its CPU build lacks: experts with 4-bit weights, NVFP4, MXFP4 and MXFP8.

vLLM finds it where this folder is on Python's path (`EMULATION` of `tests/kit/places.py`), by the folder next to this file.

**Experts with 4-bit weights** on processors without AMX. On x86 vLLM 0.32 has kernels for quantized experts only with AMX. For
GPUs it has an emulation that dequantizes them at load and computes with 16-bit weights
(`fused_moe/experts/int4_emulation_moe.py`, in Triton). Here the same is done for CPUs: vLLM's own class reads config and files
and arranges the weights, they are dequantized, and its kernel for unquantized experts computes.

**NVFP4**: vLLM 0.32 has no kernel for CPUs, but an emulation that computes what the kernels do (weights and inputs rounded to
4-bit floats, products in 16 bits: `model_executor/kernels/linear/nvfp4/emulation.py`). Here it is registered for CPUs. It
serves W4A4; for 16-bit activations vLLM always selects Marlin, which fails on CPUs. Kernels for **MXFP4** and **MXFP8** are
registered as well; vLLM selects them regardless of the checkpoint's activation format.
"""

from __future__ import annotations

from typing import Any

_registered: list[bool] = []


def register() -> None:
    """Register all. May be called any number of times."""
    if not _registered:
        _registered.append(True)
        _emulate_floats()
        _emulate_experts()


def _emulate_experts() -> None:
    """Make vLLM's CPU build compute experts with packed weights."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16,
    )

    module: Any = compressed_tensors_moe_wna16
    # The module that selects a method imports this name. Can go when vLLM's CPU build supports 4-bit experts without AMX.
    module.CompressedTensorsWNA16MoEMethod = _emulated(module.CompressedTensorsWNA16MoEMethod)


def _emulated(original: Any) -> Any:
    """A subclass of vLLM's `original` that reads a checkpoint as `original` does and then converts weights to 16 bits."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    def dequantized(layer: Any, name: str, bits: int) -> torch.Tensor:
        """The dequantized weights `[experts, out, in]` of a layer."""
        packed, scale = getattr(layer, f"{name}_weight_packed"), getattr(layer, f"{name}_weight_scale")
        experts, rows, groups = scale.shape
        columns = packed.shape[2] * 32 // bits
        zero = getattr(layer, f"{name}_weight_zero_point", None)
        weights = torch.empty(experts, rows, columns, dtype=scale.dtype)
        for index in range(experts):
            codes = unpack_from_int32(packed[index], bits, torch.Size([rows, columns]))
            codes = codes.reshape(rows, groups, -1).to(scale.dtype)
            if zero is not None:
                codes -= unpack_from_int32(zero[index], bits, torch.Size([rows, groups]), packed_dim=0)[..., None]
            weights[index] = (codes * scale[index, :, :, None]).reshape(rows, columns)
        return weights

    class Emulated(original):
        def __init__(self, weight_quant: Any, input_quant: Any, moe: Any, layer_name: str | None = None):
            # Skips the class's own __init__, where `select_wna16_moe_backend` raises for a CPU without AMX.
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


def _emulate_floats() -> None:
    """Register CPU kernels that dequantize floats in blocks before each product.

    For NVFP4 and MXFP8 vLLM's own kernels, of which the one for MXFP8 keeps inputs in 16 bits; for MXFP4, where vLLM's needs an
    AMD package, `_mxfp4_kernel`.
    """
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.platforms import PlatformEnum

    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    register_linear_kernel(_mxfp4_kernel(), PlatformEnum.CPU, "mxfp4")


def _mxfp4_kernel() -> type:
    """A vLLM kernel class for MXFP4 weights and inputs: both are dequantized, and multiplied in 16 bits."""
    import torch
    from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic

    from vlmcompress.numerics import MXFP4, ActFormat, QTensor, round_activations, unpack_fp4

    class MxFp4InPlainTorchLinearKernel(MxFp4LinearKernel):
        is_supported = classmethod(lambda cls, compute_capability=None: (True, None))

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return config.activation_quant_key == kMxfp4Dynamic, "MXFP4 inputs only"

        def process_weights_after_loading(self, layer: Any) -> None:
            weight = QTensor(unpack_fp4(layer.weight.data), layer.weight_scale.data, None, MXFP4).dequantize()
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            rounded = round_activations(x, ActFormat("float", 4, dynamic=True, mx=True)).to(x.dtype)
            return torch.nn.functional.linear(rounded, layer.weight.to(x.dtype), bias)

    return MxFp4InPlainTorchLinearKernel
