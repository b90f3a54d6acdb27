"""Quantize one model by one scheme, from loading to the written folder: seconds by phase, peak memory of GPU and host."""

from __future__ import annotations

import json
import resource
import shutil
import time
from typing import Any

from gpu import shapes
from gpu.part import Place
from gpu.steps import SCHEMES, SERVED


def run(place: Place, shape: str, name: str) -> dict[str, Any]:
    """Quantize. The checkpoint is kept if the step `serve` wants it, as a full disk helps nobody."""
    import torch

    import vlmcompress

    scheme, options = SCHEMES[name]
    source = shapes.model(place, shape, "full", apart=True)
    out = source.with_name(name)
    recipe = shapes.recipe(place, source, out, scheme, options)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began, phases = time.monotonic(), Phases()
    manifest = vlmcompress.quantize(recipe, overwrite=True, progress=phases).manifest
    seconds = time.monotonic() - began
    config = json.loads((source / "config.json").read_text())
    figures = {
        "seconds": round(seconds, 2),
        "phases": manifest.get("timing") or phases.seconds(),
        "samples": recipe.calibrate.samples if manifest["calibration"] else 0,
        "layers": config["text_config"]["num_hidden_layers"],
        "gb_before": round(manifest["size"]["weights_before"] / 1e9, 3),
        "gb_after": round(manifest["size"]["weights_after"] / 1e9, 3),
        "worst_error": max((max(by.values(), default=0.0) for by in manifest["errors"].values()), default=None),
        **peaks(),
    }
    if not (shape == next(iter(shapes.FULL)) and name in SERVED):
        shutil.rmtree(out)
    return figures


def peaks() -> dict[str, float | None]:
    """Peak memory of this process: of the GPU, allocated and reserved, and of the host, mapped files included; in GB."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "gpu_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if cuda else None,
        "host_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }


class Phases:
    """A progress that sums up the seconds between its calls by the label of the later one, as that is what was done in
    between; until the first call the model is loaded and samples are encoded."""

    def __init__(self) -> None:
        self._last, self._found = time.monotonic(), dict[str, float]()

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        label = label if self._found else "loading"
        self._found[label] = self._found.get(label, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds by label, and `rest` since the last call."""
        seconds = self._found | {"rest": time.monotonic() - self._last}
        return {label: round(value, 2) for label, value in seconds.items()}
