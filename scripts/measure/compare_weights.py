#!/usr/bin/env python
"""Compare what methods of quantizing weights lose on a model: English text, answers about images, and seconds.

    scripts/measure/compare_weights.py eval/demo/demo-llava --methods rtn gptq --formats 'W3 g64 sym'    try it
    scripts/measure/compare_weights.py MODEL --seeds 3                    every method of `weight_methods.py`
    scripts/measure/compare_weights.py MODEL --table                      print the table of what was measured so far
    scripts/measure/compare_weights.py MODEL --table --save               and put its rows into eval/weights.json, and what was
                                                                          measured of texts and questions into eval/rows
    scripts/measure/compare_weights.py --render                           print the docs' table from that file

MODEL is a model's folder. Where its tokenizer knows English, `paragraphs` of `eval/english.py` are what calibration reads and
what perplexity and divergence are measured on (`text_probe.py`). Where it brings the world's questions (demo models), these are
asked by teacher forcing (`teacher_forcing.py`), calibration reads the world's samples with images, each with a paragraph of
English after it if the model knows it: the same samples for every method, those of llm-compressor too.

For each seed statistics are collected once; each method then writes a checkpoint from them (or runs the model itself, see
`weight_methods.py`), which is loaded and measured. A line of JSON in WORK/rows.jsonl and a file of measures by text and
question are kept of each; a run that was interrupted goes on where it was. Seconds are processor seconds of one thread, of a
busy machine. The last line is one JSON object: the rows of the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import paired
import torch
import weights_table
from weight_methods import FORMATS, METHODS
from weight_methods import chosen as chosen_methods
from weights_bench import Bench, chosen, quantized

from vlmcompress.cli._process import quiet_libraries
from vlmcompress.models.data import bundled_data

EVAL = Path(__file__).resolve().parents[2] / "eval"
RESULTS, ROWS = EVAL / "weights.json", EVAL / "rows" / "weights.npz"


def row_key(args: argparse.Namespace, split: str, form: str, method: str, seed: int) -> str:
    """The key of a row, which is also the name of its file of measures."""
    what = f"{split} {args.paragraphs} {args.questions} {args.model.name} {form} {method} {args.samples} {seed}"
    return re.sub(r"[^\w.]+", "-", what)


def measure(args: argparse.Namespace) -> None:
    """Measure what WORK/rows.jsonl has no row of. Seeds are the outer loop: to stop early is to have fewer seeds."""
    args.work.mkdir(parents=True, exist_ok=True)
    path, began = args.work / "rows.jsonl", time.monotonic()
    done, benches = {row["key"] for row in paired.rows(path)}, dict[str, Bench]()
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for form, method in chosen_methods(args.methods, args.formats):
            keys = {split: row_key(args, split, form, method, seed) for split in args.splits}
            keys = {split: key for split, key in keys.items() if key not in done}
            if not keys or (METHODS[method].data_free and seed):
                continue
            if time.monotonic() - began > 60 * args.minutes:
                return
            benches = benches or {split: Bench(args.model, split, args) for split in args.splits}
            vlm, facts = quantized(benches[args.splits[0]], FORMATS[form], METHODS[method], seed)
            for split, key in keys.items():
                row = {
                    "key": key,
                    "split": split,
                    "model": args.model.name,
                    "format": form,
                    "method": method,
                    "seed": seed,
                }
                keep(args.work, row | facts, benches[split].measure(vlm))


def keep(work: Path, row: dict[str, Any], measures: dict[str, torch.Tensor]) -> None:
    """Keep measures, then the row."""
    folder = work / "measures"
    folder.mkdir(exist_ok=True)
    torch.save(measures, folder / f"{row['key']}.pt")
    row |= weights_table.means(measures)
    with (work / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({name: value for name, value in row.items() if name not in ("key", "phases")}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, default=Path("out/weights"), help="where everything is kept")
    parser.add_argument("--splits", nargs="+", choices=("validation", "test"), default=["validation"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME")
    parser.add_argument("--formats", nargs="+", default=["W4 g64", "W3 g64 sym"], metavar="NAME")
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
    name, rows, raw = args.model.name, list[dict[str, Any]](), dict[str, np.ndarray]()
    for split in args.splits:
        questions = chosen(args.model, split, args.questions) if bundled_data(args.model, split) else []
        rows += weights_table.summarise(args.work, name, split, questions)
        raw |= weights_table.raw(args.work, name, split, questions)
    if args.save:
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, joined(rows))) + "\n]\n")
        replaced = tuple(f"{row['model']}|{row['split']}|{row['format']}|{row['method']}|" for row in rows)
        with np.load(ROWS) if ROWS.exists() else contextlib.nullcontext({}) as file:
            kept = {key: file[key] for key in file if not key.startswith(replaced)}
        np.savez_compressed(ROWS, **kept | raw)
    return rows


def joined(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in place of those of the same model, split, format and method in eval/weights.json; the others stay as they are."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    kept = [row for row in kept if row["method"] in METHODS and row["format"] in FORMATS]
    by_name = {(row["model"], row["split"], row["format"], row["method"]): row for row in [*kept, *rows]}
    return [by_name[name] for name in sorted(by_name, key=weights_table.order)]


if __name__ == "__main__":
    main()
