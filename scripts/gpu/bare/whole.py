"""Quantize one model by one scheme, from loading to the written folder: seconds by phase, peak memory of GPU and host.

Calibration is what the documentation's estimates are of: 128 images of 1000 x 1000 pixels, some 1,250 tokens each.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

from gpu import shapes
from gpu.bare import measure
from gpu.part import Place
from gpu.steps import SCHEMES


def run(place: Place, shape: str, name: str) -> dict[str, Any]:
    """Quantize, and delete the checkpoint to save disk space."""
    import vlmcompress

    scheme, options = SCHEMES[name]
    source = shapes.model(place, shape, "full", apart=True)
    out = source.with_name(name)
    recipe = shapes.recipe(place, source, out, scheme, options, large=True)
    measure.forget_peaks()
    seconds, done = measure.once(lambda: vlmcompress.quantize(recipe, overwrite=True))
    manifest, config = done.manifest, json.loads((source / "config.json").read_text())
    shutil.rmtree(out)
    return {
        "seconds": round(seconds, 2),
        "phases": manifest["timing"],
        "samples": recipe.calibrate.samples if manifest["calibration"] else 0,
        "layers": config["text_config"]["num_hidden_layers"],
        "gb_before": round(manifest["size"]["weights_before"] / 1e9, 3),
        "gb_after": round(manifest["size"]["weights_after"] / 1e9, 3),
        "worst_error": max((max(by.values(), default=0.0) for by in manifest["errors"].values()), default=None),
        **measure.peaks(),
    }
