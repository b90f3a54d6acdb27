"""How often the host waits for the GPU, and what takes the time, by torch.profiler.

On a GPU a wait is a call of CUDA's runtime that synchronizes. On a CPU nothing waits; counted are the operators that would
(`item` reads a number, `nonzero` has a size that depends on data), so that the same code runs there. Copies to the host that
are no such operator are seen on a GPU only.
"""

from __future__ import annotations

from typing import Any

RUNTIME = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
OPERATORS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
TOP = 8


class Watch:
    """Profiles from `start` to `stop`; both may be called more than once, the first of each counts."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._cuda = _cuda()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile, self._state = profile(activities=kinds, acc_events=True), "new"

    def start(self) -> None:
        """Begin to count."""
        if self._state == "new":
            self._profile.start()
            self._state = "running"

    def stop(self) -> None:
        """End counting."""
        if self._state == "running":
            if self._cuda:
                import torch

                torch.cuda.synchronize()
            self._profile.stop()
            self._state = "done"

    def found(self, samples: float) -> dict[str, Any] | None:
        """Waits in all and per sample, and the operators that took the most time of the device; None if nothing was watched."""
        self.stop()
        if self._state != "done" or samples <= 0:
            return None
        rows = self._profile.key_averages()
        names = RUNTIME if self._cuda else OPERATORS
        waits = {row.key: row.count for row in rows if row.key in names}
        kind = "self_device_time_total" if self._cuda else "self_cpu_time_total"
        busy = sorted(rows, key=lambda row: -getattr(row, kind))[:TOP]
        return {
            "samples": samples,
            "waits": waits,
            "waits_per_sample": round(sum(waits.values()) / samples, 1),
            "counted": "synchronizing calls of CUDA" if self._cuda else "operators that would wait on a GPU",
            "most_ms": {row.key[:80]: round(getattr(row, kind) / 1000, 2) for row in busy},
        }


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
