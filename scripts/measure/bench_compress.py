#!/usr/bin/env python
"""Time, memory and output error of compressing a random-weight Qwen2.5-VL: a plain forward pass, stock llm-compressor, ours.

Every measurement is a process of its own (so that peak memory is its own), and the contenders take turns within one run:
machines drift, ratios hold. Loading the model is left out of the times. The output error is the same for all: the
relative squared change of the last hidden state on held-out samples, after compression, weights only. Ratios are of
processor time, which other work on the machine disturbs less than the clock's.

Random weights have no salient channels, so the norms get a log-normal gain per channel; AWQ has something to find then.

    scripts/measure/bench_compress.py                        0.3 B parameters, for a CPU
    scripts/measure/bench_compress.py --shape 7b             for a GPU
    scripts/measure/bench_compress.py --contenders forward gptq gradients gptq-ratio gptq-auto      what a balance costs
    scripts/measure/bench_compress.py --contenders forward-batched forward-fast calibrate calibrate-gradients      calibration
    scripts/measure/bench_compress.py --shape 135m --group 64    30 narrow blocks
    scripts/measure/bench_compress.py --sweep                ours only: time against samples and against layers

Stock AWQ pins host memory for an accelerator and dies without one; that step is switched off here. Nothing else is changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONTENDERS = ("forward", "stock-gptq", "gptq", "stock-awq", "awq")
CALIBRATING = ("forward-batched", "forward-fast", "calibrate", "calibrate-gradients")
WEIGHTED = ("gradients", "gptq-ratio", "gptq-auto", "gptq-mbq", "mbq")


def contender(*arguments: object) -> str:
    """Run `bench_contender.py` and return what it printed."""
    command = [sys.executable, str(Path(__file__).with_name("bench_contender.py")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def build(folder: Path, shape: str, layers: int | None) -> None:
    """Write the random checkpoint."""
    contender("build", folder, "--shape", shape, *(("--layers", layers) if layers else ()))


def measure(name: str, folder: Path, args: argparse.Namespace, samples: int | None = None) -> dict:
    """Run one measurement in a process of its own."""
    flags = ("--samples", samples or args.samples, "--tokens", args.tokens, "--group", args.group)
    return json.loads(contender(name, folder, *flags).strip().splitlines()[-1])


def compare(args: argparse.Namespace, folder: Path) -> dict:
    """Measure all contenders in turn, `repeats` times; medians and ratios."""
    build(folder, args.shape, args.layers)
    measured: dict[str, list[dict]] = {name: [] for name in args.contenders}
    for turn in range(args.repeats):
        for name in args.contenders:
            measured[name].append(measure(name, folder, args))
            print(f"{turn + 1}/{args.repeats} {name:<12}{measured[name][-1]}", flush=True)
    table = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in measured.items()
    }
    print(f"\n{'':<12}{'seconds':>10}{'CPU s':>10}{'/forward':>10}{'peak MB':>10}{'output error':>15}")
    floor = next(row["cpu_seconds"] for name, row in table.items() if name.startswith("forward"))
    for name, row in table.items():
        error = f"{row['error']:.6f}" if row["error"] else ""
        times = f"{row['seconds']:>10.1f}{row['cpu_seconds']:>10.1f}{row['cpu_seconds'] / floor:>10.1f}"
        print(f"{name:<12}{times}{row['peak_mb']:>10.0f}{error:>15}")
    summary = {
        "shape": args.shape,
        "layers": args.layers,
        "samples": args.samples,
        "tokens": args.tokens,
        "runs": table,
    }
    for ours in ("gptq", "awq"):
        stock = f"stock-{ours}"
        if {ours, stock} <= table.keys():
            summary[f"{ours}_speedup"] = round(table[stock]["cpu_seconds"] / table[ours]["cpu_seconds"], 2)
            summary[f"{ours}_error_ratio"] = round(table[ours]["error"] / table[stock]["error"], 3)
            summary[f"{ours}_peak_ratio"] = round(table[ours]["peak_mb"] / table[stock]["peak_mb"], 3)
    for name in {"calibrate", "calibrate-gradients"} & table.keys():
        for forward in {"forward", "forward-batched", "forward-fast"} & table.keys():
            summary[f"{name}_of_{forward}"] = round(table[name]["cpu_seconds"] / table[forward]["cpu_seconds"], 2)
    for name in set(WEIGHTED) & table.keys() if "gptq" in table else ():
        summary[f"{name}_of_gptq"] = round(table[name]["cpu_seconds"] / table["gptq"]["cpu_seconds"], 3)
    return summary


def sweep(args: argparse.Namespace, folder: Path) -> dict:
    """Measure ours over samples and layers: the time should grow linearly in both."""
    rows = []
    for layers, count in ((4, 8), (4, 16), (4, 32), (8, 8), (16, 8)):
        place = folder / f"layers-{layers}"
        if not place.exists():
            build(place, args.shape, layers)
        result = measure("awq", place, args, count)
        rows.append({"layers": layers, "samples": count, "cpu_seconds": result["cpu_seconds"]})
        print(rows[-1], flush=True)
    return {"shape": args.shape, "tokens": args.tokens, "sweep": rows}


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=["tiny", "135m", "0.3b", "3b", "7b"], default="0.3b")
    parser.add_argument("--layers", type=int, help="fewer or more decoder blocks than the shape has")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="tokens per sample, two thirds of them visual")
    parser.add_argument("--group", type=int, default=128, help="columns that share a scale")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS + CALIBRATING + WEIGHTED, default=list(CONTENDERS)
    )
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps((sweep if args.sweep else compare)(args, Path(folder))))


if __name__ == "__main__":
    main()
