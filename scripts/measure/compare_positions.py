#!/usr/bin/env python
"""Compare original and compact positions of the visual tokens that a reducer leaves, on the same questions.

    scripts/measure/compare_positions.py --per-family 20      try it
    scripts/measure/compare_positions.py                      all questions of the validation split: some minutes

With `positions: original` a token that is left stands where it would stand if none were dropped, with `compact` directly
behind the one before. Both are asked by `reduced_answers.py`; the difference is compact less original, in percent of the
questions, with its 95% interval, clustered by image. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import reduced_answers
import torch
from bench_reducers import DEMO, samples
from methods_table import BEYOND, about, difference, numbered

from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.reduction.choice import choose

METHODS = ("divprune", "random", "uniform")
SHARES = (0.5, 0.25, 1 / 9)


def compare(model: str, split: str, per_family: int | None) -> list[dict[str, Any]]:
    """Ask all questions with every method, share and kind of positions."""
    vlm, questions = models.load(DEMO / model), samples(model, split, per_family)
    asker = reduced_answers.Asker(vlm, reduced_answers.prepare(vlm, questions))
    images, rows = numbered([about(sample) for sample in questions]), []
    for method in METHODS:
        for share in SHARES:
            original, compact = (
                asker.ask(choose(method, {"keep": share, "positions": kind}, method)).exact.double()
                for kind in ("original", "compact")
            )
            change = difference((compact - original)[None], images)
            row = {"method": method, "keep": round(share, 3), "original": float(original.mean())}
            rows.append(row | {"compact": float(compact.mean()), "change": change})
            low, high = (100 * (change["difference"] + sign * BEYOND * change["error"]) for sign in (-1, 1))
            values = f"{100 * row['original']:.1f} {100 * rows[-1]['compact']:.1f}"
            print(
                f"{method} {share:.3f}: {values}, {100 * change['difference']:+.1f} ({low:+.1f} to {high:+.1f})",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo-llava", choices=[path.name for path in DEMO.glob("demo-*")])
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    parser.add_argument("--per-family", type=int, help="questions of each of the nine families; default: all")
    parser.add_argument("--out", type=Path, help="a file for the figures, too")
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    rows = compare(args.model, args.split, args.per_family)
    if args.out:
        args.out.write_text(json.dumps(rows) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
