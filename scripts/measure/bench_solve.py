#!/usr/bin/env python3
"""Measure the processor seconds of solving a decoder by scheme and phase, on the shapes of a real model.

Solving is what is left of `quantize --stats` when loading, reading statistics and writing are taken away. Weights are random,
and statistics those of correlated inputs: singular values that decay, a few channels that are thirty times as large as others.
One block is made and solved by each scheme in turn, `--repeats` times, so that all schemes meet the same load of the machine;
the least time of each counts, and is multiplied by the number of blocks. Phases are functions of the package, timed by Python's
profiler with the process's clock; `columns` is without `search`, and what none of them took is `rest`. `error` is the geometric
mean of the layers' relative squared output errors (of `rtn` and `fp8`, which read no statistics, of their weights').
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import pstats
import resource
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlmcompress.models import Group
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization import schemes as quantizers
from vlmcompress.quantization.calibration.solve import QuantMethod, solve_block

SHAPES = {  # hidden, intermediate, width of keys and values, blocks
    "tiny": (256, 512, 128, 2),
    "qwen2.5-0.5b": (896, 4864, 128, 24),
    "qwen2.5-vl-3b": (2048, 11008, 256, 36),
    "qwen2.5-vl-7b": (3584, 18944, 512, 28),
}
SCHEMES = ("rtn", "awq", "gptq", "gptq-plus", "nvfp4", "fp8")
PHASES = {  # phase -> (file, function); of phases within each other the outer one counts
    "smooth": ("quantizers/__init__.py", "smooth"),
    "factorize": ("quantizers/gptq.py", "prepare"),
    "ranges": ("quantizers/gptq.py", "ranges"),
    "columns": ("quantizers/_columns.py", "quantize_columns"),
    "search": ("quantizers/_local_search.py", "search"),
    "round": ("numerics/_tensors.py", "round_to_nearest"),
    "clip": ("quantizers/awq.py", "clipped"),
    "errors": ("calibration/solve.py", "_errors"),
}


def block(hidden: int, intermediate: int, keys: int) -> tuple[list[Group], dict[str, Tensor]]:
    """The groups of a Llama-like block, and its weights in bfloat16."""
    shapes = {
        "qkv": [("q", hidden, hidden), ("k", keys, hidden), ("v", keys, hidden)],
        "o": [("o", hidden, hidden)],
        "gate_up": [("gate", intermediate, hidden), ("up", intermediate, hidden)],
        "down": [("down", hidden, intermediate)],
    }
    before: dict[str, dict[str, Any]] = {
        "qkv": {"smooth": "first_norm"},
        "gate_up": {"smooth": "second_norm"},
        "down": {"smooth": "up", "smooth_kind": "linear"},
    }
    groups = [
        Group(0, name, tuple(layer for layer, *_ in layers), **before.get(name, {})) for name, layers in shapes.items()
    ]
    weights = {
        name: (torch.randn(rows, columns) / columns**0.5).bfloat16()
        for layers in shapes.values()
        for name, rows, columns in layers
    }
    return groups, weights


def statistics(width: int, rows: int) -> GroupStats:
    """Statistics of `rows` inputs whose singular values decay, with some channels that are thirty times as large as others."""
    collector = Collector(width, {"gram", "absmean", "absmax"})
    mixing = torch.randn(width, width) * (torch.arange(width) / width).mul(-4).exp()[:, None]
    mixing[:, torch.randperm(width)[: max(1, width // 256)]] *= 30
    for start in range(0, rows, 2048):
        collector.add(torch.randn(min(2048, rows - start), width) @ mixing)
    return collector.finish()


def solve(
    scheme: str, groups: list[Group], weights: Mapping[str, Tensor], stats: Mapping[str, GroupStats]
) -> dict[str, float]:
    """Processor seconds of solving the block by `scheme`, in all and by phase, and the `error` that is left."""
    module = quantizers.REGISTRY.get(scheme)
    options = module.Options()
    used = dict(stats) if module.needs(options).statistics else {}
    profiler = cProfile.Profile(time.process_time, builtins=False)
    start = time.process_time()
    result = profiler.runcall(solve_block, groups, weights, used, QuantMethod(module, options), torch.bfloat16)
    seconds = {"all": time.process_time() - start}
    for (file, _, function), (_, _, _, cumulative, callers) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        for phase, (suffix, name) in PHASES.items():
            outer = not any(caller[2] in ("smooth", "round_to_nearest") for caller in callers)
            if name == function and file.endswith(suffix) and (outer or phase == "smooth"):
                seconds[phase] = seconds.get(phase, 0.0) + cumulative
    seconds["columns"] = seconds.get("columns", 0.0) - seconds.get("search", 0.0)
    seconds["rest"] = max(0.0, 2 * seconds["all"] - sum(seconds.values()))
    logs = [math.log(value) for errors in result.errors.values() for value in errors.values()]
    return seconds | {"error": math.exp(sum(logs) / len(logs))}


def main() -> None:
    """Parse the arguments, measure, print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--rows", type=int, default=8192, help="rows that the statistics are of")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    hidden, intermediate, keys, blocks = SHAPES[args.shape]
    groups, weights = block(hidden, intermediate, keys)
    widths = {group.name: weights[group.linears[0]].shape[1] for group in groups}
    stats = {name: statistics(width, args.rows) for name, width in widths.items()}
    best: dict[str, dict[str, float]] = {}
    for _ in range(args.repeats):
        for scheme in args.schemes:
            seconds = solve(scheme, groups, weights, stats)
            if scheme not in best or seconds["all"] < best[scheme]["all"]:
                best[scheme] = seconds
    columns, errors = ["all", *PHASES, "rest"], {scheme: seconds.pop("error") for scheme, seconds in best.items()}
    print(f"{'':<12}" + "".join(f"{name:>11}" for name in columns) + f"{'error':>11}")
    for scheme, seconds in best.items():
        cells = "".join(f"{blocks * seconds.get(name, 0.0):>11.1f}" for name in columns)
        print(f"{scheme:<12}{cells}{errors[scheme]:>11.2g}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    model = {
        scheme: {name: round(blocks * value, 2) for name, value in seconds.items()} for scheme, seconds in best.items()
    }
    print(
        json.dumps(
            {
                "shape": args.shape,
                "blocks": blocks,
                "rows": args.rows,
                "threads": torch.get_num_threads(),
                "seconds": model,
                "errors": errors,
                "peak_mb": peak,
            }
        )
    )


if __name__ == "__main__":
    main()
