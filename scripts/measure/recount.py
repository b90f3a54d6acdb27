#!/usr/bin/env python
"""Count tables anew from what was measured of each question, by other code and another kind of interval than made them.

    scripts/measure/recount.py             every row that has its questions in eval/rows: stored, recounted, ! where they differ
    scripts/measure/recount.py accuracy    the rows of eval/accuracy.json alone; also boxes, pages, clips, photo, mixed, weights

Needs NumPy alone. Means must be equal. Intervals are bootstrapped: images are drawn with all their questions, texts one by one;
of ratios calibrations, too. That is another estimate: a stored interval may be half as wide, or four times, and that of a ratio
wider still by as much as Student's t exceeds 1.96 with so few calibrations. `eval/rows/NAME.npz` has arrays of a value a
question, named `model|recipe|seed|score` and so on; `image` says which questions share an image. The last line is one JSON
object; the exit code is 1 if a row differs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

EVAL = Path(__file__).resolve().parents[2] / "eval"
ACCURACY = ("accuracy", "boxes", "pages", "clips", "photo", "mixed")
DRAWS = 2000
Arrays = Mapping[str, np.ndarray]
STUDENT = {2: 12.7, 3: 4.3, 4: 3.2}  # calibrations -> standard errors to each side of 95%
Recounted = Iterator[tuple[str, int, Sequence[float], Sequence[float]]]
"""A row's name; the calibrations that its interval counts; mean and limits, as stored and recounted."""


def by_seed(arrays: Arrays, row: str, measure: str) -> dict[str, np.ndarray]:
    """A measure of each calibration of a row: seed -> `[questions]`."""
    keys = {
        key.removeprefix(row).split("|", 1)[0]: key
        for key in arrays
        if key.startswith(row) and key.endswith(f"|{measure}")
    }
    return {seed: arrays[key].astype(np.float64) for seed, key in keys.items()}


def drawn(values: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Sums of `values [kinds, questions]` over bootstrap samples of clusters, `[draws, kinds]`."""
    totals = np.zeros((clusters.max() + 1, len(values)))
    np.add.at(totals, clusters, values.T)
    size = len(totals)
    return np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), DRAWS) @ totals


def accuracy(table: str) -> Recounted:
    """Differences of the share of right answers; a question's score is its mean over calibrations."""
    arrays = np.load(EVAL / "rows" / f"{table}.npz")
    for row in json.loads((EVAL / f"{table}.json").read_text()):
        prefix = f"{row['model']}|{row['recipe']}|"
        sides = [by_seed(arrays, prefix, name) for name in ("baseline", "score")]
        if "seeds" not in row:
            continue  # measured before questions were kept
        before, after = (np.mean(list(side.values()), 0) for side in sides)
        sums = drawn(np.stack([after - before, np.ones_like(before)]), arrays[f"{prefix}0|image"])
        limits = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
        stored = [row["overall"][name] for name in ("difference", "low", "high")]
        yield f"{row['model']} {row['recipe']}", 1, stored, [float(np.mean(after - before)), *limits]


def weights() -> Recounted:
    """Logarithms of ratios to llm-compressor's divergence, over the calibrations that both have."""
    arrays = np.load(EVAL / "rows" / "weights.npz")
    rng = np.random.default_rng(0)
    for row in json.loads((EVAL / "weights.json").read_text()):
        where = f"{row['model']}|{row['split']}|"
        for what, measure in (("text", "text/kl"), ("answers", "answers/path")):
            compared = row.get(f"{what}_ratio", {})
            names = (f"{row['format']}|{row['method']}", compared.get("to", ""))
            sides = [by_seed(arrays, f"{where}{name}|", measure) for name in names]
            if not all(sides):
                continue
            # A method that reads no data has one result for all calibrations.
            a, b = (np.stack([side.get(str(seed), side["0"]) for seed in compared["seeds"]]) for side in sides)
            clusters = arrays[f"{where}{names[0]}|0|image"] if what == "answers" else np.arange(a.shape[1])
            draws = [
                np.log(np.divide(*drawn(np.stack([a[seeds].mean(0), b[seeds].mean(0)]), clusters).T))
                for seeds in rng.integers(0, len(a), (20, len(a)))
            ]
            stored = [math.log(compared[name]) for name in ("ratio", "low", "high")]
            recounted = [float(np.log(a.sum() / b.sum())), *np.quantile(np.concatenate(draws), (0.025, 0.975))]
            yield f"{row['model']} {row['split']} {names[0].replace('|', ' ')} {what}", len(a), stored, recounted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(ACCURACY)} or weights; default: all")
    args = parser.parse_args()
    counts = {"rows": 0, "differ": 0}
    for table in args.tables or (*ACCURACY, "weights"):
        if not (EVAL / "rows" / f"{table}.npz").exists():
            continue
        for name, calibrations, stored, recounted in weights() if table == "weights" else accuracy(table):
            widths = [limits[2] - limits[1] for limits in (stored, recounted)]
            equal = math.isclose(stored[0], recounted[0], rel_tol=1e-4, abs_tol=1e-6)
            most = 4 * STUDENT.get(calibrations, 1.96) / 1.96 * widths[1] + 0.02
            differs = not equal or not 0.5 * widths[1] - 1e-6 <= widths[0] <= most
            counts["rows"] += 1
            counts["differ"] += differs
            texts = ("{:+.4f} ({:+.4f} to {:+.4f})".format(*figures) for figures in (stored, recounted))
            print("!" if differs else " ", table, name, *texts, sep="  ")
    print(json.dumps(counts))
    raise SystemExit(counts["differ"] > 0)


if __name__ == "__main__":
    main()
