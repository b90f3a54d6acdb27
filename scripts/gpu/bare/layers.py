"""The linear layers of one decoder block by every scheme: seconds by phase, kernels, waits and peak memory.

Shapes are those of the model, inputs and weights are like those of trained ones (`made`). Phases are the statistics of the
inputs, the smoothing scale, the solving, and the packing for the written file; `model_seconds` is their sum times the number
of blocks. Kernels and waits are counted where a scheme solves one layer of few rows, as both depend on the columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu import shapes
from gpu.bare import made, measure
from gpu.bare.equal import checked, each
from gpu.part import Place
from gpu.steps import SCHEMES

TOKENS, ROWS = 16384, 256


def run(place: Place, shape: str) -> dict[str, Any]:
    """Run all schemes on a block of a shape. Raises `Failed`, with the figures of the others, if one does not run."""
    from vlmcompress.numerics.statistics.inputs import STATISTICS
    from vlmcompress.quantization.schemes import REGISTRY

    text = shapes.shape(place, shape, "full").text
    groups, device = layers(text), measure.device()
    blocks = text["num_hidden_layers"]
    inputs, seconds, stats = {}, 0.0, {}
    for name, (width, _) in groups.items():
        inputs[name] = made.inputs(width, 256 if place.tiny else TOKENS, device)
        made.statistics(*inputs[name], STATISTICS)  # the first call also loads libraries
        taken, stats[name] = measure.once(partial(made.statistics, *inputs[name], STATISTICS))
        seconds += taken
    inputs.clear()
    weights = {
        name: [made.weight(rows, width, device, rows) for rows in sides] for name, (width, sides) in groups.items()
    }
    methods: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in REGISTRY.names()} | SCHEMES

    def row(name: str) -> dict[str, Any]:
        scheme, chosen = methods[name]
        method = REGISTRY.get(scheme)
        return solved(method, method.OPTIONS(**chosen), weights, stats) | {"blocks": blocks}

    names = [
        name for name, (scheme, _) in methods.items() if (m := REGISTRY.get(scheme)).scheme(m.OPTIONS()) is not None
    ]
    rows = each(names, row)
    for figures in rows.values():
        if "seconds" in figures:
            figures["model_seconds"] = round(blocks * (sum(figures["seconds"].values()) + seconds), 1)
    result = {"statistics_seconds": round(seconds, 3), "tokens": 256 if place.tiny else TOKENS, "schemes": rows}
    return checked(rows, result)


def layers(text: Any) -> dict[str, tuple[int, list[int]]]:
    """Group of layers -> the width of their input, and their numbers of outputs."""
    hidden, inner, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    head = text.get("head_dim", hidden // heads)
    keys = text["num_key_value_heads"] * head
    return {
        "qkv": (hidden, [heads * head, keys, keys]),
        "o": (heads * head, [hidden]),
        "gate_up": (hidden, [inner, inner]),
        "down": (inner, [hidden]),
    }


def solved(method: Any, options: Any, weights: dict[str, list[Tensor]], stats: dict[str, Any]) -> dict[str, Any]:
    """Smooth, solve and pack all groups by one scheme: the figures."""
    from vlmcompress.export.formats import compressed_tensors
    from vlmcompress.quantization.schemes import smooth, solve

    scheme, total, errors = method.scheme(options), dict.fromkeys(("smooth", "solve", "pack"), 0.0), []
    small, first = [weights["qkv"][0][:ROWS]], stats["qkv"]
    counts = measure.counts(lambda: solve(method, small, first, options, torch.bfloat16))  # also the first call of all
    smooth(method, small, first, options)
    tried = solve(method, small, first, options, torch.bfloat16)
    compressed_tensors.FORMAT.tensors(tried.weights[0], scheme, tried.input_scale)
    measure.forget_peaks()
    for name, group in weights.items():
        ready, group_stats = group, stats[name]
        taken, smoothing = measure.once(lambda: smooth(method, group, stats[name], options))  # noqa: B023
        total["smooth"] += taken
        if (scale := smoothing.scale) is not None:
            ready, group_stats = [w.float() * scale for w in group], group_stats.rescaled(scale)
        arguments = method, ready, group_stats, options, torch.bfloat16, smoothing.factorization
        taken, solution = measure.once(partial(solve, *arguments))
        total["solve"] += taken
        input_scale = solution.input_scale
        for weight, q in zip(ready, solution.weights, strict=True):
            taken, _ = measure.once(lambda: compressed_tensors.FORMAT.tensors(q, scheme, input_scale))  # noqa: B023
            total["pack"] += taken
            some = slice(None, None, max(1, len(weight) // ROWS))
            change = q.dequantize(torch.float32)[some] - weight[some].float()
            errors.append(max(group_stats.error(change, weight[some].float()).values()))
    return {
        "seconds": {phase: round(value, 3) for phase, value in total.items()},
        "worst_error": max(errors),
        "columns": small[0].shape[1],
        "layer": counts,
        **measure.peaks(),
    }
