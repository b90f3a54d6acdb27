"""NVFP4 in vLLM's CPU build, to measure accuracy where there is no Blackwell: slow, and only when it is asked for.

vLLM 0.32 has no kernel for NVFP4 on CPUs, but an emulation that computes what the kernels do (weights and inputs rounded to
4-bit floats, products in 16 bits: `model_executor/kernels/linear/nvfp4/emulation.py`). Here it is registered for CPUs, by
vLLM's own `register_linear_kernel`. It serves W4A4; for 16-bit activations vLLM takes Marlin without asking, and refuses.
"""

from __future__ import annotations

import os

VARIABLE = "VLMCOMPRESS_EMULATE_NVFP4"
_registered: list[bool] = []


def emulate() -> None:
    """Register vLLM's emulation of NVFP4 for CPUs where the environment asks for it (`VLMCOMPRESS_EMULATE_NVFP4=1`), once."""
    if os.environ.get(VARIABLE) != "1" or _registered:
        return
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.platforms import PlatformEnum

    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    _registered.append(True)
