"""A pretended CUDA device in a CPU build of torch: `cuda:0` computes on the CPU and refuses what CUDA refuses.

Tensors on it have the device type `cuda` and go through the dispatcher's real CUDA key (`device.cpp`). Refused are mixed
devices, by the column `device_check` of torch's own table of operators; operators without a CUDA kernel; generators of another
device; products of integers and of float8; factorizations in 16 bits. Fresh memory holds NaN. Kernels are counted.

It can't show waits and races of streams, the rounding of CUDA's kernels, or speed: `scripts/gpu_check` does, on a GPU. A
process that loads it has a CUDA device for good, so tests run in processes of their own. It is built once for a version of
torch, in half a minute of processor time, and kept in the user's cache folder or the system's for temporary files.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
LIBRARY, OPERATORS = "pretended_cuda.so", "operators.json"
SWITCH = "VLMCOMPRESS_PRETENDED_CUDA"  # set by `plugin`, and read by `tests/kit/forks_parent.py`
CAPABILITY = (9, 0)

_DISPATCHED = {
    *("CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"),
    "CompositeImplicitAutogradNestedTensor",
}


def lacking() -> str | None:
    """Why the device can't be built here, in words; None where it can."""
    import torch

    if torch.version.cuda:
        return "this torch is built for CUDA"
    if not _compiler():
        return "no C++ compiler"
    return None if Path(sysconfig.get_path("include"), "Python.h").exists() else "no headers of Python"


def built() -> Path:
    """Folder of the built library; it is built unless that has been done. Several processes share one build."""
    import torch
    from torch.utils import cpp_extension

    version = f"{torch.__version__} {sys.version_info[:2]} {SOURCE.read_text()}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / f"vlmcompress-tests-{os.getuid()}"
    folder = cache / f"pretended-cuda-{hashlib.sha256(version.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / OPERATORS).exists():
            headers = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
            libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
            command = [_compiler() or "c++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", *headers, str(SOURCE)]
            command += [*libraries, "-lc10", "-ltorch_cpu", "-ltorch_python", "-o", str(folder / LIBRARY)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{SOURCE.name} can't be compiled: {done.stderr[:2000]}")
            (folder / OPERATORS).write_text(json.dumps(_operators()))
    return folder


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++")))), None)


def _operators() -> tuple[list[str], list[str]]:
    """Operators that accept no CPU scalar next to CUDA tensors, and those without a CUDA kernel, by torch's own table."""
    import torchgen
    import yaml

    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    with table.open() as file:
        entries = {
            entry["func"].split("(")[0]: entry
            for entry in yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        }
    checked, kernelless = [], []
    for name, entry in entries.items():
        generated = [part.strip() for part in entry.get("autogen", "").split(",") if part.strip()]
        if entry.get("device_check") != "NoCheck":
            checked += [name, *generated]
        structure = entries[entry["structured_delegate"]] if "structured_delegate" in entry else entry
        keys = {
            key.strip()
            for keys in structure.get("dispatch") or {"CompositeImplicitAutograd": ""}
            for key in keys.split(",")
        }
        if not keys & _DISPATCHED and "ufunc_inner_loop" not in structure and not generated:
            kernelless.append(name)
    return [f"aten::{name}" for name in checked], [f"aten::{name}" for name in kernelless]


_device: Any = None


def kernels_launched() -> int:
    """How many kernels this process has launched on the device."""
    return int(_device.kernels_launched())


def install(memory: int = 80 * 2**30) -> None:
    """Give this process the device, with so many bytes of memory."""
    import accelerate  # noqa: F401 - these look for the C parts of torch.cuda when they are imported
    import torch
    import torch._inductor.utils
    import torch.profiler
    import torch.utils.checkpoint  # noqa: F401
    import transformers.generation
    import transformers.modeling_utils  # noqa: F401

    global _device
    folder = built()
    _device = ctypes.PyDLL(str(folder / LIBRARY))
    for name in ("memory_used", "most_memory_used", "kernels_launched"):
        getattr(_device, name).restype = ctypes.c_int64
    _device.generator.restype = ctypes.py_object
    _device.begin(*(" ".join(names).encode() for names in json.loads((folder / OPERATORS).read_text())))
    _replace(memory)


def _replace(memory: int) -> None:
    """Put functions that know the device in place of those of torch that need CUDA's C parts."""
    import torch

    properties = SimpleNamespace(
        name="pretended CUDA device", total_memory=memory, major=CAPABILITY[0], minor=CAPABILITY[1],
        multi_processor_count=132, warp_size=32, gcnArchName="", is_integrated=False, uuid="0",
    )  # fmt: skip
    generator = _device.generator()

    def room(*_: Any) -> tuple[int, int]:
        return memory - _device.memory_used(), memory

    both: dict[str, Any] = {
        "is_available": lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != "",
        "device_count": lambda: 1,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: _device.memory_used(),
        "max_memory_allocated": lambda *_: _device.most_memory_used(),
        "reset_peak_memory_stats": lambda *_: _device.forget_peak(),
    }
    cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: CAPABILITY,
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": room,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "default_generators": (generator,),
        "get_rng_state": lambda *_: generator.get_state(),
        "set_rng_state": lambda state, *_: generator.set_state(state),
    }
    accelerator: dict[str, Any] = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "set_device_index": lambda *_: None,
        "get_memory_info": room,
    }
    for module, functions in ((torch.cuda, both | cuda), (torch.accelerator, both | accelerator)):
        for name, function in functions.items():
            setattr(module, name, function)
    torch.UntypedStorage.clone = _cloned  # type: ignore[method-assign] - which `copy.deepcopy` of a tensor calls


def _cloned(storage: Any) -> Any:
    import torch

    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage().copy_(storage)


@contextmanager
def hidden() -> Iterator[None]:
    """Within the context there seems to be no accelerator, and 16-bit products are computed as on one."""
    import pytest
    import torch

    from vlmcompress.models import devices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "emulated", lambda _dtype: False)
        for module in (torch.accelerator, torch.cuda):
            patch.setattr(module, "is_available", lambda: False)
        yield
