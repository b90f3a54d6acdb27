#!/usr/bin/env python
"""Accuracy of demo-photo behind every visual-token reducer, by share of the tokens and by share of background.

    scripts/measure/bench_photo.py --images 20                  try it
    scripts/measure/bench_photo.py                              goes on from ROWS
    scripts/measure/bench_photo.py --model build/demo-photo-robust
    scripts/measure/bench_photo.py --summarise                  figures of what there is so far
    scripts/measure/bench_photo.py --summarise --save           also writes eval/photo.json
    scripts/measure/bench_photo.py --render                     prints the docs' table from that file
    scripts/measure/bench_photo.py --render --plot FILE.svg     README's picture

The model is assembled first by `scripts/train/assemble_demo_photo.py`. All questions about the first IMAGES images of a
split are asked greedily in transformers, by `shared_answers.py`: what a reducer leaves of an image runs once for all of
them. `random` has three seeds. Images of LLaVA-1.5 have one size, so
`resize` is refused there, and `pool` stands for it. Differences to the model with all tokens are in percent of the
questions, with an interval of 95%, clustered by image; the bands are shares of the image's patches on which nothing
stands. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyarrow.parquet as pq
import reduced_answers
import reducers_plot
import torch
from methods_table import about, numbered, points, rows
from shared_answers import SharedAsker
from torch import Tensor

from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.models.data import Sample, bundled, encode, load_samples
from vlmcompress.reduction.choice import ReducerChoice, choose
from vlmcompress.reduction.hooks.learning import learn
from vlmcompress.reduction.support import family_refusal

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "photo.json"
SHARES = (0.5, 0.25, 1 / 9, 0.75, 1 / 3)  # the most asked for first
SEEDS = 3
METHODS: dict[str, list[dict[str, Any]]] = {
    "uniform": [{}],
    "random": [{"seed": seed} for seed in range(SEEDS)],
    "coverage": [{}, {"merge": "nearest"}],
    "divprune": [{}, {"merge": "nearest"}],
    "cdpruner": [{}],
    "scope": [{}],
    "dart": [{}, {"pivots": 4}],
    "visionzip": [{}],
    "vscan": [{"shallow": 3, "window": 4}],
    "tome": [{}],
    "dymu": [{}],
    "learned": [{}],
}
POOLED = ("1x2", "2x2", "3x3")
PLOTTED: dict[str, tuple[str, str | None]] = {  # rows -> colour (Okabe and Ito's), dashes
    "pool": ("#d55e00", None), "uniform": ("#e69f00", None), "random": ("#999999", None), "scope": ("#0072b2", None),
    "coverage": ("#009e73", None), "divprune": ("#56b4e9", None), "visionzip": ("#cc79a7", None), "dart": ("#000000", None),
}  # fmt: skip
BANDS = ((0.0, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1.01))
CALIBRATION = 64  # samples that DyMU's thresholds are learnt from


def settings() -> list[tuple[str, ReducerChoice | None]]:
    """Names of rows and reducers, the first two shares first."""
    out: list[tuple[str, ReducerChoice | None]] = [("full", None)]
    for share in SHARES:
        for method, variants in METHODS.items():
            for options in variants:
                shown = {k: v for k, v in options.items() if k in ("merge", "pivots")}
                name = " ".join([method, *(f"{k}={v}" for k, v in shown.items())])
                out.append((name, choose(method, {"keep": share} | options, "setting")))
        if share == SHARES[1]:
            out += [("pool", choose("pool", {"window": window}, "setting")) for window in POOLED]
    return out


def chosen_samples(model: Path, split: str, images: int | None) -> tuple[list[Sample], list[float]]:
    """The questions about the first `images` images, and the share of background of each question's image."""
    path = bundled(model, split)
    shares = dict(zip(*pq.read_table(path, columns=["id", "background"]).to_pydict().values(), strict=True))
    samples, names = [], dict[str, None]()
    for sample in load_samples(path, samples=None, seed=0, check_images=False):
        name = about(sample)
        if name in names or images is None or len(names) < images:
            names[name] = None
            samples.append(sample)
    return samples, [shares[sample.id] for sample in samples]


def measure(args: argparse.Namespace) -> None:
    """Append a row for every setting that ROWS lacks."""
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    done = {row["reduce"] for row in kept_rows(args)}
    shares = [float(Fraction(share)) for share in args.shares or ()]
    vlm = models.load(args.model)
    samples, _ = chosen_samples(args.model, args.split, args.images)
    asker = SharedAsker(vlm, reduced_answers.prepare(vlm, samples))
    for group, chosen in settings():
        key = str(chosen or "full")
        if key in done or (args.groups and group not in (*args.groups, "full")):
            continue
        if shares and chosen and getattr(chosen.options, "keep", None) not in shares:
            continue
        if chosen and (
            family_refusal(vlm.spec, chosen.method) or (chosen.options.scorer is not None and not args.scorer)
        ):
            continue
        start = time.process_time()
        answers = asker.ask(_ready(vlm, chosen, args))
        row = {
            "model": args.model.name, "split": args.split, "images": args.images, "reduce": key, "group": group,
            "keep": getattr(chosen.options, "keep", None) if chosen else 1.0,
            "left": round(int(answers.after.sum()) / int(answers.before.sum()), 4),
            "exact": "".join(map(str, answers.exact.int().tolist())),
            "seconds": round(time.process_time() - start, 1),
        }  # fmt: skip
        with args.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = f"{100 * answers.exact.double().mean():.1f}% of {row['left']:.3f}"
        print(f"{time.strftime('%H:%M:%S')} {key}: {shown}, {row['seconds']} s", file=sys.stderr, flush=True)


def _ready(vlm: models.VLM, chosen: ReducerChoice | None, args: argparse.Namespace) -> ReducerChoice | None:
    """The reducer with what it has to learn first, or its scorer."""
    if chosen and chosen.options.scorer is not None:
        return ReducerChoice(chosen.method, replace(chosen.options, scorer=str(args.scorer)))  # type: ignore[call-arg]
    if chosen and chosen.options.unlearnt:
        learning = load_samples(bundled(args.model, "calibration"), samples=CALIBRATION, seed=0)
        return learn(vlm, encode([sample for sample in learning if sample.images], vlm), chosen)
    return chosen


def kept_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows measured so far on these questions."""
    wanted_rows = (args.model.name, args.split, args.images)
    return [row for row in rows(args.rows) if (row["model"], row["split"], row["images"]) == wanted_rows]


def summarise(args: argparse.Namespace) -> dict[str, Any]:
    """Accuracy with all tokens, and for each row and share the difference to it, overall, by band and by family."""
    samples, backgrounds = chosen_samples(args.model, args.split, args.images)
    clusters = numbered([about(sample) for sample in samples])
    share, families = torch.tensor(backgrounds), [sample.family or "" for sample in samples]
    parts = {"all": torch.ones(len(samples), dtype=torch.bool)}
    parts |= {f"{low:.0%}-{min(high, 1):.0%}": (share >= low) & (share < high) for low, high in BANDS}
    parts |= {name: torch.tensor([family == name for family in families]) for name in sorted(set(families))}
    grouped: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in kept_rows(args):
        grouped.setdefault((row["group"], row["keep"] or row["left"]), []).append(row)
    full = _exact(grouped.pop(("full", 1.0)))
    figures = [
        {"group": group, "keep": keep, "left": found_rows[0]["left"]}
        | {name: _change(_exact(found_rows), full, mask, clusters) for name, mask in parts.items() if mask.any()}
        for (group, keep), found_rows in grouped.items()
    ]
    accuracy = {name: round(100 * float(full[:, mask].mean()), 1) for name, mask in parts.items() if mask.any()}
    counts = {name: int(mask.sum()) for name, mask in parts.items()}
    images = int(clusters.max()) + 1
    return {
        "model": args.model.name,
        "split": args.split,
        "images": images,
        "counts": counts,
        "full": accuracy,
        "figures": figures,
    }


def _exact(found_rows: list[dict[str, Any]]) -> Tensor:
    """[seeds, questions]: 1 where the answer is right."""
    return torch.tensor([[int(letter) for letter in row["exact"]] for row in found_rows]).double()


def _change(exact: Tensor, full: Tensor, mask: Tensor, clusters: Tensor) -> list[float]:
    """The difference to all tokens in percent of the questions, and half its interval."""
    return points((exact - full)[:, mask], clusters[mask])


def render(summary: dict[str, Any]) -> str:
    """The docs' table: a line a row, differences at each share, and at the smallest where background covers so much."""
    shares, smallest = sorted(SHARES, reverse=True), min(SHARES)
    bands = [f"{low:.0%}-{min(high, 1):.0%}" for low, high in BANDS]
    cells: dict[str, dict[str, str]] = {}
    for figure in summary["figures"]:
        nearest = min(shares, key=lambda share: abs(share - figure["left"]))
        note = f" ({figure['left']:.0%})" if abs(figure["left"] / nearest - 1) > 0.1 else ""
        row = cells.setdefault(figure["group"], {})
        row[f"{nearest:.0%}"] = "{:+.1f} ± {:.1f}".format(*figure["all"]) + note
        if nearest == smallest:
            row |= {band: "{:+.1f} ± {:.1f}".format(*figure[band]) for band in bands if band in figure}
    columns = [*(f"{share:.0%}" for share in shares), *bands]
    lines = [
        f"{summary['counts']['all']:,} questions about {summary['images']:,} scenes of the {summary['split']} split; with all "
        f"tokens {summary['full']['all']}% are right, by share of background "
        + ", ".join(f"{summary['full'][band]}%" for band in bands)
        + ".",
        "",
        f"| kept | {' | '.join(columns[: -len(bands)])} | "
        + " | ".join(f"{smallest:.0%}, background {band}" for band in bands)
        + " |",
        "|---|" + "---:|" * len(columns),
    ]
    order = sorted(cells, key=lambda group: -_value(cells[group].get("25%", "-99 ± 0")))
    return "\n".join(
        [*lines, *(f"| `{group}` | " + " | ".join(cells[group].get(c, "") for c in columns) + " |" for group in order)]
    )


def _value(cell: str) -> float:
    return float(cell.split(" ")[0])


def plot(summary: dict[str, Any]) -> str:
    """README's picture: exact match against the share of tokens."""
    model, full = summary["model"], summary["full"]["all"] / 100
    figures = [
        {
            "model": model,
            "group": figure["group"],
            "reduce": figure["group"],
            "kept": figure["left"],
            "cached": figure["left"],
            "exact": {"all": full + figure["all"][0] / 100},
        }
        for figure in summary["figures"]
    ]
    return reducers_plot.draw({"full": {model: {"all": full}}, "figures": figures}, PLOTTED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/demo-photo", help="folder of the assembled model")
    parser.add_argument("--rows", type=Path, default=ROOT / "build/photo-rows.jsonl", help="where answers are kept")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--images", type=int, help="ask about the first so many images; default: all")
    parser.add_argument("--groups", nargs="+", metavar="ROW", help="rows of the table to measure; default: all")
    parser.add_argument("--shares", nargs="+", metavar="SHARE", help="shares to measure, such as 1/9; default: all")
    parser.add_argument("--scorer", type=Path, help="file of `vlmcompress learn-reducer`, for the row of `learned`")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curves")
    parser.add_argument("--summarise", action="store_true", help="measure nothing")
    parser.add_argument("--save", action="store_true", help="write RESULTS")
    parser.add_argument("--render", action="store_true", help="print the docs' table of RESULTS")
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    if not args.summarise and not args.render:
        measure(args)
    summary = json.loads(RESULTS.read_text()) if args.render else summarise(args)
    if args.save:
        head = json.dumps(summary | {"figures": []}).removesuffix("]}")
        RESULTS.write_text(head + "\n" + ",\n".join(map(json.dumps, summary["figures"])) + "\n]}\n")  # a figure a line
    if args.plot:
        args.plot.write_text(plot(summary))
    print(render(summary))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
