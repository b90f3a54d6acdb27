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
import copy
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import methods_table
import teacher_forcing
import torch
from plant_outliers import drawn, most_visual, plant, write

from vlmcompress import models
from vlmcompress.commands._process import quiet_libraries
from vlmcompress.data import Sample, bundled, encode, load_samples
from vlmcompress.models import VLM
from vlmcompress.recipe import resolve
from vlmcompress.runs import calibrate
from vlmcompress.runs.quantize import quantize

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "methods.json"
MODELS = ("demo-llava", "demo-qwen")
VARIANTS = ("plain", "all", "vision")
GROUPS = 128
BALANCES = ("ratio", "mbq", "auto")


@dataclass(frozen=True)
class Setting:
    """One row of the table: `recipe` is what `vlmcompress quantize` gets; `stock` names a method of llm-compressor instead.

    `seeds`: whether the result depends on the calibration data.
    """

    method: str
    bits: str
    recipe: dict[str, Any] = field(default_factory=dict)
    stock: str | None = None
    seeds: bool = True

    @property
    def key(self) -> str:
        return f"{self.method} {self.bits}"


def weight_settings(bits: int, group: int) -> Iterator[Setting]:
    """Weight-only methods at a number of bits, asymmetric, with groups of `group` columns (-1: one for each row)."""
    label = f"W{bits}" + ("" if group == GROUPS else " channel")
    grid = {"bits": bits, "group_size": group, "symmetric": False}

    def ours(method: str, scheme: str, **extra: Any) -> Setting:
        return Setting(method, label, {"scheme": scheme, "options": grid | extra}, seeds=scheme != "rtn")

    yield ours("rtn", "rtn")
    yield ours("gptq", "gptq")
    for balance in BALANCES:
        yield ours(f"gptq {balance}", "gptq", balance=balance)
    if group == GROUPS:
        yield ours("awq", "awq")
        yield ours("awq auto", "awq", balance="auto")
        yield ours("mbq", "mbq", objective="gram")
        yield ours("mbq mae", "mbq", objective="mae")
        yield Setting("stock gptq", label, stock="gptq")
        yield Setting("stock awq", label, stock="awq")


def allocations() -> Iterator[Setting]:
    """Settings of GPTQ with bits shared out: 3.25 per weight, and as many as 3 bits with their scales and zero points take."""
    recipe = {"scheme": "gptq", "options": {"group_size": GROUPS, "symmetric": False, "balance": "auto"}}
    for rule in ("error", "luq", "luq-reverse", "qvlm"):
        yield Setting(f"bits by {rule}", "3.25", recipe | {"bits": {"budget": 3.25, "among": [2, 3, 4, 8], "by": rule}})
    yield Setting("bits by error", "3.15", recipe | {"bits": {"budget": 3.149, "among": [2, 3, 4, 8], "by": "error"}})


def nvfp4() -> Iterator[Setting]:
    """NVFP4, mixed with FP8 and pure, with inputs of 4 bits, and pure with inputs of 16; `6` is without four-over-six."""
    yield Setting("fp8", "W8A8", {"scheme": "fp8", "options": {}}, seeds=False)
    for label, format_options in (
        ("NVFP4 mixed", {}),
        ("NVFP4", {"mixed": False}),
        ("NVFP4A16", {"mixed": False, "activations": 16}),
    ):
        for rounding in ("rtn", "gptq", "awq"):
            for name, changes in ((rounding, {}), (f"{rounding} 6", {"four_over_six": False})):
                options = {**format_options, **changes, "rounding": rounding}
                yield Setting(name, label, {"scheme": "nvfp4", "options": options})


def settings() -> list[Setting]:
    """All rows, for one model, variant and seed."""
    rows = [Setting("bf16", "16", seeds=False)]
    for bits in (4, 3, 2):
        rows += weight_settings(bits, GROUPS)
    rows += allocations()
    rows += weight_settings(4, -1)
    for balance in ("off", "ratio", "auto"):
        name = "int8" if balance == "off" else f"int8 {balance}"
        rows.append(Setting(name, "W8A8", {"scheme": "int8", "options": {"balance": balance}}))
    return [*rows, *nvfp4()]


class Bench:
    """One model and variant: its folder, the questions, and the original's answers."""

    def __init__(self, model: str, variant: str, args: argparse.Namespace):
        self.args, self.model, self.variant = args, model, variant
        self.source = ROOT / "eval" / "demo" / model
        self.data = bundled(self.source, "calibration")
        self.questions = chosen(self.source, args.split, args.per_family)
        self.folder = self.source if variant == "plain" else planted(self.source, variant, args.work)
        self.vlm = models.load(self.folder)
        packed = args.work / "questions" / f"{model}-{args.split}-{args.per_family}.pt"
        self.batches = teacher_forcing.cached(
            packed,
            lambda: teacher_forcing.pack(teacher_forcing.encode_questions(models.load(self.source), self.questions)),
        )
        kept = args.work / "questions" / f"{model}-{variant}-{args.split}-{args.per_family}-original.pt"
        self.original, self.label, self.question = teacher_forcing.cached(
            kept,
            lambda: teacher_forcing.predictions(replace(self.vlm, model=copy.deepcopy(self.vlm.model)), self.batches),
        )

    def statistics(self, seed: int) -> Path:
        """Collect, once, statistics of the unquantized model from the calibration samples of a seed."""
        out = self.args.work / "stats" / f"{self.model}-{self.variant}-{self.args.samples}-{seed}"
        if not (out / "statistics.json").exists():
            keys = self._given(out, seed) | {"scheme": "gptq"}
            start = time.process_time()
            calibrate.calibrate(resolve(keys).recipe, needs=calibrate.KINDS, resume=True)
            (out.parent / f"{out.name}.seconds").write_text(str(time.process_time() - start))
        return out

    def run(self, setting: Setting, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Measure a method: measures `[questions]`, and facts about its checkpoint."""
        if setting.method == "bf16":
            return teacher_forcing.measure(self.original, self.original, self.label, self.question), {}
        if setting.stock:
            vlm, facts = self._stock(setting, seed)
        else:
            vlm, facts = self._ours(setting, seed)
        start = time.process_time()
        logits, label, question = teacher_forcing.predictions(vlm, self.batches)
        facts["asking_seconds"] = round(time.process_time() - start, 1)
        return teacher_forcing.measure(self.original, logits, label, question), facts

    def _given(self, out: Path, seed: int) -> dict[str, Any]:
        samples = {"data": str(self.data), "samples": self.args.samples}
        return {"model": str(self.folder), "out": str(out), "seed": seed, "calibrate": samples}

    def _ours(self, setting: Setting, seed: int) -> tuple[VLM, dict[str, Any]]:
        out = self.args.work / "checkpoint"
        keys = self._given(out, seed) | setting.recipe
        if not setting.seeds:
            keys.pop("calibrate")
        elif setting.recipe["options"].get("objective", "gram") == "gram":  # the others run the model themselves
            keys["calibrate"] = {"stats": str(self.statistics(seed))}
        start = time.process_time()
        manifest = quantize(resolve(keys).recipe, overwrite=True).manifest
        facts = {"seconds": round(time.process_time() - start, 2), "bytes": manifest["size"]["weights_after"]}
        facts["bytes_before"] = manifest["size"]["weights_before"]
        return teacher_forcing.load_quantized(out, self.vlm), facts

    def _stock(self, setting: Setting, seed: int) -> tuple[VLM, dict[str, Any]]:
        from stock_methods import run_stock

        vlm = replace(self.vlm, model=copy.deepcopy(self.vlm.model))
        samples = load_samples(self.data, samples=self.args.samples, seed=seed)
        batches = encode(samples, vlm)
        start = time.process_time()
        run_stock(vlm, batches, str(setting.stock), int(setting.bits[1]), GROUPS)
        return vlm, {"seconds": round(time.process_time() - start, 2)}


def chosen(model: Path, split: str, per_family: int | None) -> list[Sample]:
    """Choose the first `per_family` questions of each family of a split."""
    samples = load_samples(bundled(model, split), samples=None, seed=0, check_images=False)
    counts: dict[str, int] = {}
    kept = []
    for sample in samples:
        counts[sample.family] = 1 + counts.get(sample.family, 0)
        if per_family is None or counts[sample.family] <= per_family:
            kept.append(sample)
    return kept


def planted(source: Path, variant: str, work: Path) -> Path:
    """The checkpoint with planted outliers, written once, as `plant_outliers.py` writes it."""
    out = work / "models" / f"{source.name}-{variant}"
    if not out.exists():
        vlm = models.load(source)
        facts: dict[str, Any] = {"source": source.name, "where": variant, "factor": 16, "channels": 12}
        if variant == "all":
            channels, facts["seed"] = drawn(vlm, 12, 0), 0
        else:
            batches = encode(load_samples(bundled(source, "calibration"), samples=64, seed=0), vlm)
            channels, share = most_visual(vlm, batches, 12)
            facts["visual_share"] = round(share, 3)
        out.parent.mkdir(parents=True, exist_ok=True)
        write(vlm, plant(vlm, channels, 16), out, facts)
    return out


def measure(args: argparse.Namespace) -> None:
    """Run the settings that WORK/rows.jsonl has no row of."""
    args.work.mkdir(parents=True, exist_ok=True)
    path, chosen_settings = args.work / "rows.jsonl", [row for row in settings() if re.search(args.only, row.key)]
    done = {row["key"] for row in methods_table.rows(path)}
    for seed in range(args.seeds):
        for model in args.models:
            for variant in args.variants:
                todo = [(s, row_key(args, model, variant, s, seed)) for s in chosen_settings if s.seeds or seed == 0]
                todo = [(s, key) for s, key in todo if key not in done]
                bench = Bench(model, variant, args) if todo else None
                for setting, key in todo:
                    assert bench is not None
                    measures, facts = bench.run(setting, seed)
                    keep(args.work, path, key, setting, bench, seed, measures, facts)
    shutil.rmtree(args.work / "checkpoint", ignore_errors=True)


def row_key(args: argparse.Namespace, model: str, variant: str, setting: Setting, seed: int) -> str:
    """The key of a row, which is also the name of its file of measures."""
    name = f"{args.split}{args.per_family or ''} {model} {variant} {setting.key} {args.samples} {seed}"
    return re.sub(r"[^\w.]+", "-", name)


def keep(
    work: Path, path: Path, key: str, setting: Setting, bench: Bench, seed: int, measures: dict, facts: dict
) -> None:
    """Keep measures by question, then the row."""
    folder = work / "measures"
    folder.mkdir(exist_ok=True)
    torch.save({name: value.float() for name, value in measures.items()}, folder / f"{key}.pt")
    row = {"key": key, "model": bench.model, "variant": bench.variant, "method": setting.method, "bits": setting.bits}
    row |= {"seed": seed, "split": bench.args.split, "samples": bench.args.samples} | facts
    row |= {name: float(value.mean()) for name, value in measures.items()}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    shown = " ".join(f"{name} {row[name]:.5f}" for name in teacher_forcing.MEASURES)
    print(f"{bench.model} {bench.variant} {setting.key} seed {seed}: {shown} {facts}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("out/methods"), help="where everything is kept")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--per-family", type=int, default=200, help="questions of each of the ten families")
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
    args = parser.parse_args()
    quiet_libraries()
    if not args.render:
        if not args.summarise:
            measure(args)
        results = methods_table.summarise(
            args.work,
            args.split,
            {m: chosen(ROOT / "eval" / "demo" / m, args.split, args.per_family) for m in args.models},
        )
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(args.results.read_text())
    print(methods_table.render(results))
    print(json.dumps(results["verdicts"]))


if __name__ == "__main__":
    main()
