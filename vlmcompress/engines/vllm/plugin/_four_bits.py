"""4-bit weights in vLLM's CPU build on a processor without AVX-512: unpacked to 16 bits when they are loaded.

The CPU build brings one library for each kind of x86 processor, and that for AVX2 alone lacks the kernel of 4-bit weights,
`cpu_gemm_wna16` (vLLM 0.32): a checkpoint loads, and the first question fails. Here vLLM's own class reads and packs
the weights; they are then unpacked into a plain matrix. Memory is that of 16-bit weights, answers are those of the checkpoint.
"""

from __future__ import annotations

from typing import Any

KERNEL = "cpu_gemm_wna16"
BLOCK = 16  # output channels that vLLM's kernel keeps together


def unpack_on_load() -> None:
    """Replace vLLM's kernel of 4-bit weights where this processor's library lacks it. May be called any number of times."""
    from vllm.platforms import CpuArchEnum, current_platform

    if not current_platform.is_cpu() or current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        return
    import torch
    import vllm._custom_ops  # noqa: F401  (imports the library)
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel

    if not hasattr(torch.ops._C, KERNEL):
        replace(CPUWNA16LinearKernel)


def replace(kernel: Any) -> None:
    """Let vLLM's class `CPUWNA16LinearKernel` unpack weights `[in, out]` once they are read, and multiply by them."""
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
    """The matrix `[in, out]` of weights as vLLM's CPU kernel keeps them.

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
