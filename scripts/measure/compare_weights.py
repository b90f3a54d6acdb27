#!/usr/bin/env python
"""Compare what methods of quantizing weights lose on a model: English text, answers about images, and seconds.

    scripts/measure/compare_weights.py eval/demo/demo-llava --methods rtn gptq awq --formats W3     try it
    scripts/measure/compare_weights.py MODEL --seeds 3                    every method of `weight_methods.py`
    scripts/measure/compare_weights.py MODEL --table                      print the table of what was measured so far
    scripts/measure/compare_weights.py MODEL --table --save               and put its rows into eval/weights.json
    scripts/measure/compare_weights.py --render                           print the docs' table from that file

MODEL is a model's folder. Where its tokenizer knows English, `paragraphs` of `eval/english.py` are what calibration reads and
what perplexity and divergence are measured on (`text_probe.py`). Where it brings the world's questions (demo models), these are
asked by teacher forcing (`teacher_forcing.py`), calibration reads the world's samples, and English beside them if it knows it.
`--variant` plants outliers first (`plant_outliers.py`).

For each seed statistics are collected once; each method then writes a checkpoint from them (or runs the model itself, see
`weight_methods.py`), which is loaded and measured. A line of JSON in WORK/rows.jsonl and a file of measures by text and
question are kept of each; a run that was interrupted goes on where it was. Seconds are processor seconds of one thread, of a
busy machine. The last line is one JSON object: the rows of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import methods_table
import teacher_forcing
import text_probe
import torch
import weights_table
from bench_methods import VARIANTS, chosen, planted
from weight_methods import FORMATS, METHODS, Row
from weight_methods import chosen as chosen_methods

from eval import english
from vlmcompress import models
from vlmcompress.commands._process import quiet_libraries
from vlmcompress.data import Sample, bundled, encode, load_mixed
from vlmcompress.models import VLM
from vlmcompress.recipe import resolve
from vlmcompress.runs import calibrate
from vlmcompress.runs.quantize import quantize

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "weights.json"


class Bench:
    """A model under test: its folder, texts and questions, and what it says in 16 bits."""

    def __init__(self, source: Path, args: argparse.Namespace):
        self.args, self.name, self.work = args, f"{source.name}-{args.variant}", args.work
        self.folder = source if args.variant == "plain" else planted(source, args.variant, args.work)
        self.world = bundled(source, "calibration")
        self.questions: list[Sample] = chosen(source, args.split, args.questions) if self.world else []
        self.plain = models.load(self.folder)
        self.english = text_probe.speaks(self.plain)

    @cached_property
    def texts(self) -> text_probe.Reference | None:
        """The model in 16 bits on English; None where it knows none."""
        if not self.english:
            return None
        path = self.work / "reference" / f"{self.name}-{self.args.split}-{self.args.paragraphs}-texts.pt"
        texts = english.paragraphs(self.args.split)[: self.args.paragraphs]

        def make() -> text_probe.Reference:
            vlm = models.load(self.folder)
            return text_probe.reference(vlm, text_probe.tokenized(vlm, texts))

        return teacher_forcing.cached(path, make)

    @cached_property
    def asked(self) -> tuple[list[teacher_forcing.Rows], tuple[torch.Tensor, ...]] | None:
        """The world's questions as inputs of the language model, and what it says to them in 16 bits."""
        if not self.questions:
            return None
        path = self.work / "reference" / f"{self.name}-{self.args.split}-{self.args.questions}-questions.pt"

        def make() -> tuple[list[teacher_forcing.Rows], tuple[torch.Tensor, ...]]:
            vlm = models.load(self.folder)
            rows = teacher_forcing.pack(teacher_forcing.encode_questions(vlm, self.questions))
            return rows, teacher_forcing.predictions(vlm, rows)

        return teacher_forcing.cached(path, make)

    def sources(self) -> dict[str, str]:
        """The recipe's `data`, and `text` beside images."""
        if not self.english:
            return {"data": str(self.world)}
        path = self.work / "english.jsonl"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "".join(json.dumps(text_probe.turns(text)) + "\n" for text in english.paragraphs("calibration"))
            )
        return {"data": str(self.world), "text": str(path)} if self.world else {"data": str(path)}

    def given(self, out: Path, seed: int) -> dict[str, Any]:
        """The keys of a recipe that all methods share."""
        samples: dict[str, Any] = {**self.sources(), "samples": self.args.samples}
        return {"model": str(self.folder), "out": str(out), "seed": seed, "calibrate": samples}

    def statistics(self, seed: int, row: Row) -> Path:
        """Collect, once, statistics of the model in 16 bits, with gradients where a chosen method reads them; `.seconds` beside
        them says how long that took."""
        reading = not row.blind and any(METHODS[method].reads_gradients for method in self.args.methods)
        needs = calibrate.KINDS - {"entropy"} - (set() if reading else {"gradient"})
        out = self.work / "stats" / f"{self.name}-{self.args.samples}-{seed}{'-gradients' if reading else ''}"
        if not (out / "statistics.json").exists():
            start = time.process_time()
            keys = self.given(out, seed) | {"scheme": "gptq"}
            calibrate.calibrate(resolve(keys).recipe, needs=needs, resume=True)
            out.with_name(f"{out.name}.seconds").write_text(str(time.process_time() - start))
        return out

    def samples(self, seed: int) -> list[dict[str, torch.Tensor]]:
        """The calibration samples, encoded."""
        sources = self.sources()
        samples, texts = load_mixed(sources["data"], sources.get("text"), samples=self.args.samples, seed=seed)
        return encode([*samples, *texts], self.plain)

    def measure(self, vlm: VLM) -> dict[str, torch.Tensor]:
        """Measure a quantized model: `text/NAME [texts]` and `answers/NAME [questions]`."""
        values_by_name: dict[str, torch.Tensor] = {}
        if self.texts is not None:
            values_by_name |= {f"text/{name}": values for name, values in text_probe.compare(vlm, self.texts).items()}
        if self.asked is not None:
            rows, (original, label, question) = self.asked
            if not _same_inputs(vlm, self.plain):  # e.g. a rotated one: it reads other embeddings
                rows = teacher_forcing.pack(teacher_forcing.encode_questions(vlm, self.questions))
            logits, *_ = teacher_forcing.predictions(vlm, rows)
            measures = teacher_forcing.measure(original, logits, label, question)
            values_by_name |= {f"answers/{name}": values for name, values in measures.items()}
        return values_by_name


def _same_inputs(quantized: VLM, other: VLM) -> bool:
    """Whether what enters the language model is the same in both."""
    spec, parts = quantized.spec, (quantized.model.get_input_embeddings(), other.model.get_input_embeddings())
    pairs = [tuple(part.weight for part in parts)]
    for name in (*spec.vision, *spec.projector):
        mine, others = (dict(vlm.model.get_submodule(name).named_parameters()) for vlm in (quantized, other))
        pairs += [(mine[key], others[key]) for key in others if key in mine]
    return all(torch.equal(a.float(), b.float()) for a, b in pairs)


def quantized(bench: Bench, form: str, row: Row, seed: int) -> tuple[VLM, dict[str, Any]]:
    """Quantize the model by a method, and say how long that took."""
    if row.kind in ("stock", "autoround"):
        return _others(bench, form, row, seed)
    out = bench.work / "checkpoint"
    keys = bench.given(out, seed) | row.given(form)
    facts: dict[str, Any] = {}
    if row.data_free:
        keys.pop("calibrate")
    elif row.kind == "stats":
        stats = bench.statistics(seed, row)
        keys["calibrate"] = {"stats": str(stats)}
        facts["statistics_seconds"] = round(float(stats.with_name(f"{stats.name}.seconds").read_text()), 1)
    start = time.process_time()
    manifest = quantize(resolve(keys).recipe, overwrite=True).manifest
    facts |= {"seconds": round(time.process_time() - start, 1), "phases": manifest.get("timing")}
    facts |= {"bytes": manifest["size"]["weights_after"], "bytes_before": manifest["size"]["weights_before"]}
    vlm = teacher_forcing.load_quantized(out, bench.plain)
    shutil.rmtree(out)
    return vlm, facts


def _others(bench: Bench, form: str, row: Row, seed: int) -> tuple[VLM, dict[str, Any]]:
    """Quantize the model by someone else's package, in place: in float32, as CPUs multiply BF16 four times as slowly."""
    grid, vlm = FORMATS[form], models.load(bench.folder)
    vlm.model.float()
    options = {"bits": grid.bits, "group_size": grid.group, "symmetric": grid.symmetric} if grid else {}
    start = time.process_time()
    if row.kind == "stock":
        from stock_methods import run_stock

        run_stock(vlm, bench.samples(seed), row.scheme, **options)
    else:
        from auto_round_contender import run_auto_round

        kept = bench.work / "autoround" / re.sub(r"[^\w.]+", "-", f"{bench.name} {form} {row.options} {seed}")
        return vlm, run_auto_round(vlm, bench.samples(seed), kept, seed=seed, **options, **row.options)
    return vlm, {"seconds": round(time.process_time() - start, 1)}


def row_key(args: argparse.Namespace, name: str, form: str, method: str, seed: int) -> str:
    """The key of a row, which is also the name of its file of measures."""
    what = f"{args.split} {args.paragraphs} {args.questions} {name} {form} {method} {args.samples} {seed}"
    return re.sub(r"[^\w.]+", "-", what)


def measure(args: argparse.Namespace) -> None:
    """Measure what WORK/rows.jsonl has no row of. Seeds are the outer loop: to stop early is to have fewer seeds."""
    args.work.mkdir(parents=True, exist_ok=True)
    path, began = args.work / "rows.jsonl", time.monotonic()
    done, bench = {row["key"] for row in methods_table.rows(path)}, None
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for form, method in chosen_methods(args.methods, args.formats):
            name = f"{args.model.name}-{args.variant}"
            key = row_key(args, name, form, method, seed)
            if key in done or (METHODS[method].data_free and seed):
                continue
            if time.monotonic() - began > 60 * args.minutes:
                return
            bench = bench or Bench(args.model, args)
            vlm, facts = quantized(bench, form, METHODS[method], seed)
            keep(args, key, {"model": name, "format": form, "method": method, "seed": seed} | facts, bench.measure(vlm))


def keep(args: argparse.Namespace, key: str, row: dict[str, Any], measures: dict[str, torch.Tensor]) -> None:
    """Keep measures, then the row."""
    folder = args.work / "measures"
    folder.mkdir(exist_ok=True)
    torch.save(measures, folder / f"{key}.pt")
    row = {"key": key, "split": args.split} | row | weights_table.means(measures)
    with (args.work / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({name: value for name, value in row.items() if name not in ("key", "phases")}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, default=Path("out/weights"), help="where everything is kept")
    parser.add_argument("--variant", choices=VARIANTS, default="plain", help="where outliers are planted")
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME")
    parser.add_argument("--formats", nargs="+", default=["W4", "W3", "W2", "3.25", "W8A8"], metavar="NAME")
    parser.add_argument("--paragraphs", type=int, default=40, help="texts that are measured on")
    parser.add_argument("--questions", type=int, default=30, help="questions of each family of the world")
    parser.add_argument("--samples", type=int, default=96, help="calibration samples")
    parser.add_argument("--seeds", type=int, default=1, help="calibrations, each with samples of its own")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no method after so many")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table")
    parser.add_argument("--save", action="store_true", help="put the rows of the table into eval/weights.json")
    parser.add_argument("--render", action="store_true", help="print the table of eval/weights.json")
    args = parser.parse_args()
    quiet_libraries()
    try:
        chosen_methods(args.methods, args.formats)
    except ValueError as error:
        parser.error(str(error))
    if args.render:
        rows = json.loads(RESULTS.read_text())
    elif args.model is None:
        parser.error("name a model")
    else:
        rows = tabulated(args)
    print(weights_table.render(rows))
    print(json.dumps(rows))


def tabulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table of a model, after measuring what it is asked for."""
    args.model = args.model.resolve()
    if not args.table:
        measure(args)
    name = f"{args.model.name}-{args.variant}"
    questions = chosen(args.model, args.split, args.questions) if bundled(args.model, args.split) else []
    rows = weights_table.summarise(args.work, name, args.split, questions)
    if args.save:
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, joined(rows))) + "\n]\n")
    return rows


def joined(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in place of those of the same model, split, format and method in eval/weights.json; the others stay as they are."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    by_name = {(row["model"], row["split"], row["format"], row["method"]): row for row in [*kept, *rows]}
    return [by_name[name] for name in sorted(by_name, key=weights_table.order)]


if __name__ == "__main__":
    main()
