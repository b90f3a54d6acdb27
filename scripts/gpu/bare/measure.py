"""Measure seconds, kernels, host synchronizations and peak memory, on the GPU, or on the CPU without one.

What is timed is started and awaited once before, so that neither compiling nor the first allocation counts. Kernels and waits
are counted in runs of their own, as that slows everything down: kernels by torch's profiler (on a CPU the operators that it
sees), waits by CUDA's debug mode, in which torch warns of each operation that makes the host wait.
"""

from __future__ import annotations

import resource
import time
import warnings
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch


def device() -> torch.device:
    """The GPU, or the CPU without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    """Wait until the GPU is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def once(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and what it returns."""
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    return time.perf_counter() - start, result


def seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of some calls, after an unmeasured one."""
    call()
    return median(once(call)[0] for _ in range(repeats))


def counts(call: Callable[[], Any]) -> dict[str, int | None]:
    """Kernels that a call starts, and how often the host waits for the GPU (None on a CPU), after a call that does not count.

    Copies count as kernels, and so does setting memory.
    """
    from torch.profiler import ProfilerActivity, profile

    call()
    wait()
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        call()
        wait()
    kinds = Counter(str(event.device_type()) for event in profiler.profiler.kineto_results.events())
    return {"kernels": kinds["DeviceType.CUDA" if cuda else "DeviceType.CPU"], "waits": waits(call)}


def waits(call: Callable[[], Any]) -> int | None:
    """How often a call makes the host wait for the GPU; None on a CPU."""
    if not torch.cuda.is_available():
        call()
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def forget_peaks() -> None:
    """Reset the measurement of the GPU's peak memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, float | None]:
    """Peak memory of this process: of the GPU, allocated and reserved, and of the host, mapped files included; in GB."""
    cuda = torch.cuda.is_available()
    return {
        "gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "gpu_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if cuda else None,
        "host_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }
