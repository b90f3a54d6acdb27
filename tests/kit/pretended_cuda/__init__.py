"""A pretended CUDA device in a CPU build of torch: `cuda:0` computes on the CPU and refuses what CUDA refuses.

Tensors on it have the device type `cuda` and go through the dispatcher's real CUDA key (`device.cpp`). Refused are mixed
devices, by the column `device_check` of torch's own table of operators; operators without a CUDA kernel; generators of another
device; products of integers and of float8; factorizations in 16 bits. Fresh memory holds NaN. Kernels are counted, and what
makes the host wait and copies between host and device with the line of the package that caused them (`counting`).

It can't show races of streams, the rounding of CUDA's kernels, or speed. A process that loads it has a CUDA device for good,
so tests run in processes of their own (`checks.py`). It is built once for a version of torch, in half a minute of processor
time, and kept in the user's cache folder or the system's for temporary files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
CAPABILITY = (9, 0)
OTHERS = " (in transformers)"

# Operators behind which CUDA's kernels read a size or a state on the host.
WAITING = (
    *("nonzero", "nonzero.out", "masked_select", "masked_select.out", "equal", "bincount", "repeat_interleave.Tensor"),
    *("_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive", "isin.Tensor_Tensor_out"),
    *("linalg_eigh", "_linalg_eigh.eigenvalues", "_linalg_svd", "_linalg_svd.U", "linalg_lstsq.out", "linalg_qr.out"),
    *("geqrf.a", "median", "_histogramdd_from_bin_cts"),
)
_DISPATCHED = {
    *("CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"),
    "CompositeImplicitAutogradNestedTensor",
}


def lacking() -> str | None:
    """Why the device can't be built here, in words; None where it can."""
    import torch

    if torch.version.cuda:
        return "this torch is built for CUDA"
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++")))):
        return "no C++ compiler"
    return None if shutil.which("ninja") else "no ninja, which torch builds extensions with"


def built() -> Path:
    """Folder of the built extension; it is built unless that has been done. Several processes share one build."""
    import torch

    version = f"{torch.__version__} {sys.version_info[:2]} {SOURCE.read_text()}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / f"vlmcompress-tests-{os.getuid()}"
    folder = cache / f"pretended-cuda-{hashlib.sha256(version.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "operators.json").exists():
            from torch.utils import cpp_extension

            cpp_extension.load(
                "pretended_cuda",
                [str(SOURCE)],
                build_directory=str(folder),
                extra_cflags=["-O1", "-w", "-std=c++20"],
                is_python_module=False,
            )
            (folder / "operators.json").write_text(json.dumps(_operators()))
    return folder


def _operators() -> tuple[list[str], list[str]]:
    """Operators that accept no CPU scalar beside CUDA tensors, and those without a CUDA kernel, by torch's own table."""
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


def install(memory: int = 80 * 2**30) -> ModuleType:
    """Give this process the device, with so many bytes of memory; returns the extension."""
    import importlib.util

    import accelerate  # noqa: F401 - these look for the C parts of torch.cuda when they are imported
    import torch
    import torch._inductor.utils
    import torch.profiler
    import torch.utils.checkpoint  # noqa: F401
    import transformers.generation
    import transformers.modeling_utils  # noqa: F401

    folder = built()
    spec = importlib.util.spec_from_file_location("pretended_cuda", folder / "pretended_cuda.so")
    assert spec and spec.loader
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    checked, kernelless = json.loads((folder / "operators.json").read_text())
    device.operators(set(checked), set(kernelless), {f"aten::{name}" for name in WAITING})
    _replace(device, memory)
    return device


def _replace(device: ModuleType, memory: int) -> None:
    """Put functions that know the device in place of those of `torch.cuda` and `torch.accelerator` that need CUDA's C parts."""
    import torch

    properties = SimpleNamespace(
        name="pretended CUDA device", total_memory=memory, major=CAPABILITY[0], minor=CAPABILITY[1],
        multi_processor_count=132, warp_size=32, gcnArchName="", is_integrated=False, uuid="0",
    )  # fmt: skip
    generator = device.default_generator()

    def room(*_: Any) -> tuple[int, int]:
        return memory - device.figures()[0], memory

    both: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "synchronize": lambda *_: _counts.note("wait", "synchronize", 0),
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: device.figures()[0],
        "max_memory_allocated": lambda *_: device.figures()[1],
        "reset_peak_memory_stats": lambda *_: device.reset_peak(),
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


@dataclass
class Counts:
    """What happened on the device.

    Attributes:
        kernels: how many were launched.
        places: (kind, operator, line of the package) -> times; kinds are "wait", "download" (for which the host waits, too) and
            "upload". What that line calls of transformers is told apart by `OTHERS`.
        nbytes: bytes copied, by kind.
        peak: most bytes of the device in use at a time.
    """

    kernels: int = 0
    places: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    @property
    def waits(self) -> int:
        """How often the host waited for the device."""
        return self.of("wait") + self.of("download")

    def of(self, kind: str) -> int:
        """How often a kind of thing happened."""
        return sum(times for (which, *_), times in self.places.items() if which == kind)

    def note(self, kind: str, what: str, nbytes: int) -> None:
        """Count it, for the innermost line of the package."""
        frame, place, others = sys._getframe(1), "elsewhere", ""
        while frame:
            file = frame.f_code.co_filename
            if "/site-packages/transformers/models/" in file:
                others = OTHERS
            if "/vlmcompress/" in file and "/site-packages/" not in file:
                place = f"{file.rpartition('/vlmcompress/')[2]}:{frame.f_lineno}{others}"
                break
            frame = frame.f_back  # type: ignore[assignment]
        self.places[kind, what.split(" ")[0], place] += 1
        self.nbytes[kind] += nbytes


_counts = Counts()


@contextmanager
def counting(device: ModuleType) -> Iterator[Counts]:
    """Count what happens on the device within the context."""
    global _counts
    before, _counts = device.figures()[2], Counts()
    counts = _counts
    device.reset_peak()
    device.listen(counts.note)
    try:
        yield counts
    finally:
        device.listen(None)
        counts.kernels, counts.peak = device.figures()[2] - before, device.figures()[1]
