"""Replacements for kernels that vLLM's CPU build lacks: 4-bit weights without AVX-512, quantized embeddings, FP8 with AMX.

**4-bit weights** on a processor without AVX-512: unpacked to 16 bits at load. The CPU build has one library per kind of x86
processor, and the one for AVX2 has no kernel for 4-bit weights, `cpu_gemm_wna16` (vLLM 0.32): a checkpoint loads, and the
first request fails. Here vLLM's own class reads and packs the weights, which are then unpacked into a plain matrix. Memory is
that of 16-bit weights; answers do not change.

**Quantized embeddings**: vLLM 0.32 loads them, but looks up rows with a Triton kernel. Here torch does that, for CPU builds
without Triton.

**FP8** on processors with AMX. vLLM 0.32 uses `torch._scaled_mm`. Without AMX torch computes it in float32; with AMX it calls
oneDNN, whose FP8 kernel requires AMX-FP16 (Granite Rapids), and which falls back to a scalar reference on others: 18 s for 128
tokens and a matrix of 1024 x 2816, compared with 0.003 s in 16 bits. vLLM 0.33 has its own kernel for bfloat16 outputs
(`CPUFp8ChannelWiseScaledMMLinearKernel`, with 16-bit inputs), but not for others. Here weights are converted to bfloat16 at
load, which represents FP8 exactly, and so are the rounded inputs; the result is that of FP8. Memory is that of 16-bit weights.
"""

from __future__ import annotations

import os
from typing import Any

from vlmcompress.engines.vllm.plugin._contract import left_out

_registered: list[str] = []


KERNEL = "cpu_gemm_wna16"
BLOCK = 16  # output channels per block of vLLM's kernel


def unpack_on_load() -> None:
    """Replace vLLM's kernel for 4-bit weights if this processor's library lacks it. May be called any number of times."""
    from vllm.platforms import CpuArchEnum, current_platform

    if not current_platform.is_cpu() or current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        return
    import torch
    import vllm._custom_ops  # noqa: F401  (imports the library)

    if hasattr(torch.ops._C, KERNEL) or left_out("4-bit weights on CPUs without AVX-512"):
        return
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel

    replace(CPUWNA16LinearKernel)


def replace(kernel: Any) -> None:
    """Make vLLM's class `CPUWNA16LinearKernel` unpack weights `[in, out]` after loading, and multiply by them."""
    import torch
    from torch.nn import functional
    from vllm.logger import init_logger

    original = kernel.process_weights_after_loading
    if hasattr(original, "unpacks"):
        return

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        init_logger(__name__).warning_once(
            "This processor has no AVX-512, and vLLM no 4-bit kernel for it: weights are unpacked to 16 bits, and take as much"
            " memory."
        )
        original(self, layer)
        # vllm/model_executor/kernels/linear/mixed_precision/cpu.py::CPUWNA16LinearKernel has repacked the codes for its
        # kernel.
        packed, scales, zeros = self._get_weight_params(layer)[:3]
        packed.data = unpacked(packed.data, scales.data, zeros, self.config.weight_type).t().contiguous()

    def apply_weights(
        self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.linear(x, getattr(layer, self.w_q_name), bias)

    process_weights_after_loading.unpacks = True  # type: ignore[attr-defined]
    kernel.process_weights_after_loading = process_weights_after_loading
    kernel.apply_weights = apply_weights


def unpacked(packed: Any, scales: Any, zeros: Any, weight_type: Any) -> Any:
    """Unpack weights from the layout of vLLM's CPU kernel to a matrix `[in, out]`.

    Args: `packed [out / 16, in * 2]`: int32 of eight codes each, blocks of 16 output channels; `scales [groups, out]`;
    `zeros [groups, out / 8]`: packed zero points, or None; `weight_type`: vLLM's type of the codes.
    """
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32 as unpack

    words = BLOCK * weight_type.size_bits // 32
    rows = packed.shape[1] // words
    plain = packed.view(-1, rows, words).permute(1, 0, 2).reshape(rows, -1)
    codes = unpack(plain, weight_type, 1)
    groups = len(scales)
    offset = weight_type.bias if zeros is None else unpack(zeros.data, weight_type, 1)[:, None]
    values = (codes.view(groups, rows // groups, -1) - offset).to(scales.dtype) * scales[:, None]
    return values.reshape(rows, -1)


def look_up_packed() -> None:
    """Make vLLM's CPU build look up rows of a quantized embedding without Triton. May be called any number of times."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON or left_out("quantized embeddings on CPUs"):
        return
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_embedding

    module: Any = compressed_tensors_embedding
    # vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors_embedding.py::_dequant_gather_triton is
    # called by this name. Can go when the CPU build includes Triton, or vLLM a lookup without it.
    module._dequant_gather_triton = looked_up


def looked_up(ids: Any, packed: Any, scale: Any, width: int, bits: int) -> Any:
    """Rows `[tokens, width]` of an embedding of symmetric codes, in the type of its scales.

    Args:
        ids: `[tokens]`; `packed`: int32 `[vocabulary, words]`; `scale`: `[vocabulary, groups]`.
    """
    import torch

    shifts = torch.arange(0, 32, bits, device=packed.device)
    codes = ((packed[ids][..., None] >> shifts) & (2**bits - 1)).flatten(1)[:, :width] - 2 ** (bits - 1)
    scales = scale[ids].float().repeat_interleave(width // scale.shape[1], 1)
    return (codes * scales).to(scale.dtype)


FP8_PART = "FP8 on CPUs with AMX"
DISABLED = "VLLM_DISABLED_KERNELS"  # names of kernels that vLLM skips
REFERENCE = ("PerTensorTorchFP8ScaledMMLinearKernel", "ChannelWiseTorchFP8ScaledMMLinearKernel")  # torch._scaled_mm


def multiply_fp8() -> None:
    """If FP8 products would use oneDNN's reference on this processor, register another kernel instead of those; only once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not takes_reference() or FP8_PART in _registered or left_out(FP8_PART):
        return
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.platforms import PlatformEnum

    _registered.append(FP8_PART)
    register_linear_kernel(fp8_kernel(), PlatformEnum.CPU, "fp8")
    # vllm/model_executor/kernels/linear/__init__.py::is_supported_and_can_implement_kernel skips kernels with these names, and
    # tries registered ones last. For bfloat16 outputs this can go with vLLM 0.32.
    os.environ[DISABLED] = ",".join(filter(None, (os.environ.get(DISABLED), *REFERENCE)))


def takes_reference() -> bool:
    """Whether torch uses oneDNN for FP8 products on this processor, without a fast kernel."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported() and not torch.cpu._is_amx_fp16_supported())


def fp8_kernel() -> Any:
    """A vLLM kernel class for FP8 weights with a scale per output or per matrix, and inputs rounded to FP8."""
    import torch
    from vllm.logger import init_logger
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import TorchFP8ScaledMMLinearKernel

    # The name contains "Kernel", as vLLM logs it and `scripts/gpu/engine.py` searches for that word.
    class Fp8In16BitsLinearKernel(TorchFP8ScaledMMLinearKernel):
        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return True, None

        def get_output_padding(self) -> int | None:
            return None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            init_logger("vllm.vlmcompress").warning_once(
                "oneDNN has no kernel for FP8 on this processor: weights become 16 bits when they are loaded, and take as much "
                "memory."
            )
            weight = layer.get_parameter(self.layer_param_names[0])
            weight.data = weight.data.to(torch.bfloat16)

        # vllm/model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py::FP8ScaledMMLinearKernel.apply_weights rounds
        # inputs before calling this.
        def apply_scaled_mm(
            self, *, A: Any, B: Any, out_dtype: Any, As: Any, Bs: Any, bias: Any, output_shape: list
        ) -> torch.Tensor:
            wide = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32  # the sums would overflow float16
            products = torch.nn.functional.linear(A.to(wide), B.t().to(wide)).float()
            products = products * As.reshape(-1, 1) * Bs.reshape(1, -1)
            return (products if bias is None else products + bias).to(out_dtype).view(*output_shape)

    return Fp8In16BitsLinearKernel
