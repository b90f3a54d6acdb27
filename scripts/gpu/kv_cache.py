"""An FP8 KV cache with the checkpoint's own scales against a BF16 one: equal answers but for rounding, twice the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu import agreement, kernels, probe, shapes
from gpu.environment import target
from gpu.part import Failed, Place

APART = 0.3  # nats
SHAPE = "qwen3-vl-8b"  # its keys are normed; FP8 keys of Qwen2.5 lose more


def run(place: Place) -> dict[str, Any]:
    """Store scales in a shallow model, ask it with and without the FP8 cache, compare."""
    from vlmcompress import targets

    folder, images = checkpoint(place), kernels.pictures(place)
    probed: dict[str, dict[str, Any]] = {}
    for name, kind in (("bf16", "bfloat16"), ("fp8", "fp8")):
        log = place.work / "logs" / f"probe-kv-{name}.log"
        options = probe.options_for(0.3)
        child = probe.start(folder, log, images, shapes.QUESTION, kv_cache_dtype=kind, **options)
        probed[name] = probe.finish(child, log)
        if "error" in probed[name]:
            raise Failed("\n".join([f"vLLM does not start with a KV cache of {kind}", *probed[name]["error"]]))
    scales = [value for pair in probed["fp8"]["kv_scales"] for value in pair]
    gap = agreement.between(probed["fp8"]["first"], probed["bf16"]["first"])
    result = {
        "apart_nats": round(gap, 4),
        "tokens": {name: figures["kv_tokens"] for name, figures in probed.items()},
        "backends": {name: figures["decoder_backends"] for name, figures in probed.items()},
        "scales": [round(value, 5) for value in scales],
        "targets_say": targets.get(target()).kv_fp8,
    }
    if not scales or all(value == 1.0 for value in scales):
        raise Failed("the engine has no scales of keys and values from the checkpoint", result)
    if not gap <= APART:
        raise Failed(f"first tokens with FP8 are {gap:.3f} nats from those with BF16, more than {APART}", result)
    if not 1.9 <= probed["fp8"]["kv_tokens"] / probed["bf16"]["kv_tokens"] <= 2.1:
        raise Failed("the FP8 cache does not hold twice as many tokens", result)
    return result


def checkpoint(place: Place) -> Path:
    """The shallow checkpoint with scales of keys and values: FP8 weights, the usual companion."""
    import vlmcompress

    source = shapes.model(place, SHAPE, "shallow")
    folder = source.with_name("kv-fp8")
    if not (folder / "config.json").is_file():
        vlmcompress.quantize(shapes.recipe(place, source, folder, "fp8", {}, kv_cache="fp8"), overwrite=True)
    if not json.loads((folder / "config.json").read_text())["quantization_config"].get("kv_cache_scheme"):
        raise Failed("the checkpoint has no kv_cache_scheme")
    return folder
