"""Quantize one model by one scheme, from loading to the written folder: seconds by phase, peak memory of GPU and host."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from gpu import shapes
from gpu.part import Place
from gpu.steps import SCHEMES, SERVED

SHALLOW, SOLVED = "qwen2.5-vl-7b", ("awq", "gptq")  # what is calibrated without an engine, and solved from that


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
    began = time.monotonic()
    manifest = vlmcompress.quantize(recipe, overwrite=True).manifest
    seconds = time.monotonic() - began
    config = json.loads((source / "config.json").read_text())
    figures = {
        "seconds": round(seconds, 2),
        "phases": manifest["timing"],
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


def without_engine(place: Place) -> dict[str, Any]:
    """Collect a shallow model's statistics and solve schemes from them, as the command line does, with llm-compressor out of
    sight, so that torch, transformers and compressed-tensors alone do it: seconds by phase and scheme, and peak memory."""
    with hidden("llmcompressor"):
        return _from_statistics(place)


def _from_statistics(place: Place) -> dict[str, Any]:
    import vlmcompress

    source = shapes.model(place, SHALLOW, "shallow", apart=True)
    stats = source.with_name("stats")
    recipe = shapes.recipe(place, source, stats, "gptq", {})
    began = time.monotonic()
    manifest = vlmcompress.calibrate(recipe, overwrite=True).manifest
    seconds, solve_seconds = time.monotonic() - began, {}
    for scheme in SOLVED:
        calibration = {"data": recipe.calibrate.data, "samples": recipe.calibrate.samples, "stats": str(stats)}
        out = source.with_name(f"from-stats-{scheme}")
        solving = vlmcompress.Recipe.of(str(source), str(out), scheme=scheme, calibrate=calibration)
        began = time.monotonic()
        vlmcompress.quantize(solving, overwrite=True)
        solve_seconds[scheme] = round(time.monotonic() - began, 2)
        shutil.rmtree(out)
    shutil.rmtree(stats)
    return {
        "seconds": round(seconds, 2),
        "phases": manifest["timing"],
        "samples": recipe.calibrate.samples,
        "solve_seconds": solve_seconds,
        **peaks(),
    }


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Within the context importing a package fails as if it were not installed."""
    assert package not in sys.modules, f"{package} is imported already"
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def peaks() -> dict[str, float | None]:
    """Peak memory of this process: of the GPU, allocated and reserved, and of the host, mapped files included; in GB."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "gpu_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if cuda else None,
        "host_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }
