"""Calibrating and solving where there is no vLLM: seconds and peak memory.

`vlmcompress calibrate` and `quantize --stats` run on a shallow model with llm-compressor out of sight, so that torch,
transformers and compressed-tensors alone do it.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from gpu import shapes
from gpu.part import Place
from gpu.quantizing import Phases, peaks

SHAPE = "qwen2.5-vl-7b"
SOLVED = ("awq", "gptq")


def run(place: Place) -> dict[str, Any]:
    """Collect a model's statistics and solve schemes from them, as the command line does, with llm-compressor out of sight."""
    with hidden("llmcompressor"):
        return calibrate(place)


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Within the context importing a package fails as if it were not installed."""
    assert package not in sys.modules, f"{package} is imported already"
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def calibrate(place: Place) -> dict[str, Any]:
    """Seconds by phase, seconds to solve each scheme, and peak memory."""
    import vlmcompress

    source = shapes.model(place, SHAPE, "shallow", apart=True)
    stats, phases = source.with_name("stats"), Phases()
    recipe = shapes.recipe(place, source, stats, "gptq", {})
    began = time.monotonic()
    manifest = vlmcompress.calibrate(recipe, overwrite=True, progress=phases).manifest
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
        "phases": manifest.get("timing") or phases.seconds(),
        "samples": recipe.calibrate.samples,
        "solve_seconds": solve_seconds,
        **peaks(),
    }
