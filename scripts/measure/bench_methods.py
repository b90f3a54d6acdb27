#!/usr/bin/env python
"""Compare the losses of every quantization method on the demo models, plain and with planted outliers.

    scripts/measure/bench_methods.py --split validation --per-family 30 --seeds 1      try it
    scripts/measure/bench_methods.py                                                   all of it; writes eval/methods.json
    scripts/measure/bench_methods.py --render                                          print the docs' table from that file

For each model, variant (`plain`; 12 channels a norm times 16, drawn at random: `all`, or the most visual ones: `vision`; see
`plant_outliers.py`) and calibration seed, statistics are collected once, each method writes a checkpoint from them
(llm-compressor's own run as they do), and the checkpoint is asked all questions by teacher forcing (`teacher_forcing.py`: exact
match as greedy decoding would have it, and the divergence from the original). Rows are appended to WORK/rows.jsonl as they
come, and an interrupted run goes on where it was. Seeds are the outer loop: to stop early is to have fewer seeds.

Seconds are processor seconds of one thread, of a busy machine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import methods_table
import teacher_forcing
import torch
from weight_methods import Grid, Row, budget
from weights_bench import VARIANTS, Bench, chosen, quantized

from vlmcompress.cli._process import quiet_libraries
from vlmcompress.quantization import calibrate

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "eval" / "demo"
RESULTS = ROOT / "eval" / "methods.json"
MODELS = ("demo-llava", "demo-qwen")
GROUPS = 128
BALANCES = ("ratio", "mbq")


@dataclass(frozen=True)
class Setting:
    """One row of the table: a method at a number format, which is called `bits` there."""

    method: str
    bits: str
    row: Row
    grid: Grid | None = None

    @property
    def key(self) -> str:
        return f"{self.method} {self.bits}"


def weight_settings(bits: int, group: int) -> Iterator[Setting]:
    """Weight-only methods at a number of bits, asymmetric, with groups of `group` columns (-1: one for each row)."""
    rows = {"rtn": Row("rtn", data_free=True), "gptq": Row("gptq")}
    rows |= {f"gptq {balance}": Row("gptq", {"balance": balance}) for balance in BALANCES}
    if group == GROUPS:
        rows |= {
            "awq": Row("awq"),
            "awq ratio": Row("awq", {"balance": "ratio"}),
            "mbq": Row("mbq", {"objective": "gram"}),
        }
        rows |= {"mbq mae": Row("mbq", {"objective": "mae"}, kind="run")}
        rows |= {"stock gptq": Row("gptq", kind="stock"), "stock awq": Row("awq", kind="stock")}
    label, grid = f"W{bits}" + ("" if group == GROUPS else " channel"), Grid(bits, group, symmetric=False)
    return (Setting(method, label, row, grid) for method, row in rows.items())


def allocations() -> Iterator[Setting]:
    """Settings of GPTQ with bits shared out: 3.25 per weight, and as many as 3 bits with their scales and zero points take."""
    options = {"group_size": GROUPS, "symmetric": False, "balance": "ratio"}
    for rule in ("error", "luq", "qvlm"):
        yield Setting(f"bits by {rule}", "3.25", Row("gptq", options, budget(3.25, by=rule)))
    yield Setting("bits by error", "3.15", Row("gptq", options, budget(3.149, by="error")))


def nvfp4() -> Iterator[Setting]:
    """NVFP4, mixed with FP8 and pure, with inputs of 4 bits, and pure with inputs of 16; `6` is without four-over-six."""
    yield Setting("fp8", "W8A8", Row("fp8", data_free=True))
    pure = {"mixed": False}
    for label, options in (("NVFP4 mixed", {}), ("NVFP4", pure), ("NVFP4A16", pure | {"activations": 16})):
        for rounding in ("rtn", "gptq", "awq"):
            for name, changes in ((rounding, {}), (f"{rounding} 6", {"four_over_six": False})):
                yield Setting(name, label, Row("nvfp4", {**options, **changes, "rounding": rounding}))


def settings() -> list[Setting]:
    """All rows, for one model, variant and seed."""
    rows = [Setting("bf16", "16", Row(data_free=True))]
    for bits in (4, 3, 2):
        rows += weight_settings(bits, GROUPS)
    rows += allocations()
    rows += weight_settings(4, -1)
    for balance in ("off", "ratio"):
        name = "int8" if balance == "off" else f"int8 {balance}"
        rows.append(Setting(name, "W8A8", Row("int8", {"balance": balance})))
    return [*rows, *nvfp4()]


def measure(args: argparse.Namespace) -> None:
    """Run the settings that WORK/rows.jsonl has no row of."""
    args.work.mkdir(parents=True, exist_ok=True)
    done = {row["key"] for row in methods_table.rows(args.work / "rows.jsonl")}
    chosen_settings = [setting for setting in settings() if re.search(args.only, setting.key)]
    for seed, model, variant in product(range(args.seeds), args.models, args.variants):
        args.variant = variant
        todo = [(s, row_key(args, model, s, seed)) for s in chosen_settings if not (s.row.data_free and seed)]
        todo = [(setting, key) for setting, key in todo if key not in done]
        bench = Bench(DEMO / model, args) if todo else None
        for setting, key in todo:
            assert bench is not None
            keep(args, key, model, setting, seed, *run(bench, setting, seed))


def run(bench: Bench, setting: Setting, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Measure a method: measures `[questions]`, and facts about its checkpoint."""
    if setting.method == "bf16":
        _, (original, label, question) = bench.reference_answers
        return teacher_forcing.measure(original, original, label, question), {}
    vlm, facts = quantized(bench, setting.grid, setting.row, seed, calibrate.KINDS)
    start = time.process_time()
    measures = {name.removeprefix("answers/"): values for name, values in bench.measure(vlm).items()}
    return measures, facts | {"asking_seconds": round(time.process_time() - start, 1)}


def row_key(args: argparse.Namespace, model: str, setting: Setting, seed: int) -> str:
    """The key of a row, which is also the name of its file of measures."""
    name = f"{args.split}{args.questions or ''} {model} {args.variant} {setting.key} {args.samples} {seed}"
    return re.sub(r"[^\w.]+", "-", name)


def keep(
    args: argparse.Namespace, key: str, model: str, setting: Setting, seed: int, measures: dict, facts: dict
) -> None:
    """Keep measures by question, then the row."""
    folder = args.work / "measures"
    folder.mkdir(exist_ok=True)
    torch.save({name: value.float() for name, value in measures.items()}, folder / f"{key}.pt")
    row = {"key": key, "model": model, "variant": args.variant, "method": setting.method, "bits": setting.bits}
    row |= {"seed": seed, "split": args.split, "samples": args.samples} | facts
    row |= {name: float(value.mean()) for name, value in measures.items()}
    with (args.work / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    shown = " ".join(f"{name} {row[name]:.5f}" for name in teacher_forcing.MEASURES)
    print(f"{model} {args.variant} {setting.key} seed {seed}: {shown} {facts}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("out/methods"), help="where everything is kept")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument(
        "--per-family",
        type=int,
        default=200,
        dest="questions",
        metavar="N",
        help="questions of each of the ten families",
    )
    parser.add_argument("--samples", type=int, default=128, help="calibration samples")
    parser.add_argument("--seeds", type=int, default=3, help="calibrations, each with samples of its own")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument(
        "--only", default="", help="regular expression that `method bits` must match, e.g. '^gptq.* W3'"
    )
    parser.add_argument("--summarise", action="store_true", help="measure nothing, write RESULTS from WORK as it is")
    parser.add_argument("--render", action="store_true", help="print the table of RESULTS")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.set_defaults(paragraphs=0)  # the demo models know no English
    args = parser.parse_args()
    quiet_libraries()
    if not args.render:
        if not args.summarise:
            measure(args)
        questions = {model: chosen(DEMO / model, args.split, args.questions) for model in args.models}
        results = methods_table.summarise(args.work, args.split, questions)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(args.results.read_text())
    print(methods_table.render(results))
    print(json.dumps(results["verdicts"]))


if __name__ == "__main__":
    main()
