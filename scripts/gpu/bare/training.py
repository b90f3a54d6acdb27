"""Runs that need gradients, a rotation or ranges of keys and values, on a model of full width with three decoder blocks.

Each part runs a verb's function on random weights, and measures seconds by phase, peak memory, and whether it finishes. The
learned weights are meaningless. `gradients` collects the statistics of `calibrate` with a gradient pass, and solves a scheme.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from gpu import shapes
from gpu.bare import measure
from gpu.part import Failed, Place

SHAPE = "qwen2.5-vl-7b"
STEPS, BATCH = 10, 2
NEEDS = ("gram", "absmax", "absmean", "gradient")


def run(place: Place, what: str) -> dict[str, Any]:
    """Run `gradients`, `recover`, `learn-reducer`, `rotate` or `kv-cache`. Raises `Failed` if a figure is not finite."""
    source = shapes.model(place, SHAPE, "shallow", apart=True)
    out = source.with_name(f"training-{what}")
    works = {"gradients": gradients, "recover": recover, "learn-reducer": learn_reducer, "rotate": rotate,
             "kv-cache": kv_cache}  # fmt: skip
    measure.forget_peaks()
    try:
        seconds, figures = measure.once(lambda: works[what](place, source, out))
    finally:
        for path in (out, Path(f"{out}-quantized"), Path(f"{out}.safetensors")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    result = {"seconds": round(seconds, 2), **figures, **measure.peaks()}
    if odd := [name for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)]:
        raise Failed(f"{', '.join(odd)} should be a number", result)
    return result


def gradients(place: Place, source: Path, out: Path) -> dict[str, Any]:
    """Solve with `mbq`, which reads gradients."""
    import vlmcompress

    options = {"objective": "gram"}
    recipe = shapes.recipe(place, source, out, "mbq", options)
    manifest = vlmcompress.quantize(recipe, overwrite=True).manifest
    return {"phases": manifest["timing"], "samples": recipe.calibrate.samples}


def recover(place: Place, source: Path, out: Path) -> dict[str, Any]:
    """Some steps of training with a reducer."""
    from vlmcompress.training.recover import recover
    from vlmcompress.training.train_student import TrainingOptions

    recipe = shapes.recipe(place, source, out, "none", {}, reduce="divprune:0.5")
    manifest = recover(recipe, TrainingOptions(steps=STEPS, batch=BATCH, every=STEPS // 2), overwrite=True).manifest
    return {"phases": manifest["timing"], "steps": STEPS, "batch": BATCH}


def learn_reducer(place: Place, source: Path, out: Path) -> dict[str, Any]:
    """Some steps of training a scorer, which can't learn from random weights and reports that at its end."""
    from vlmcompress.training.learn_reducer import ScorerTraining, learn_reducer
    from vlmcompress.utils.errors import UserError

    facts: dict[str, Any] = {"timing": {}}
    recipe = shapes.recipe(place, source, Path(f"{out}.safetensors"), "none", {})
    try:
        facts = learn_reducer(recipe, ScorerTraining(steps=STEPS, batch=BATCH, every=STEPS // 2), overwrite=True)
    except UserError as error:
        if not str(error).startswith("nothing was learned"):
            raise
    return {"phases": facts["timing"], "steps": STEPS, "batch": BATCH, "learned": bool(facts["timing"])}


def rotate(place: Place, source: Path, out: Path) -> dict[str, Any]:
    """Rotate the hidden states and quantize after that."""
    import vlmcompress

    recipe = shapes.recipe(place, source, out, "rtn", {}, rotate="hadamard")
    return {"phases": vlmcompress.quantize(recipe, overwrite=True).manifest["timing"]}


def kv_cache(place: Place, source: Path, out: Path) -> dict[str, Any]:
    """Ranges of keys and values, and the scales of an FP8 cache."""
    import vlmcompress

    recipe = shapes.recipe(place, source, out, "fp8", {}, kv_cache="fp8")
    manifest = vlmcompress.quantize(recipe, overwrite=True).manifest
    return {"phases": manifest["timing"], "samples": recipe.calibrate.samples}
