#!/usr/bin/env python
"""Accuracy of the demo models with every visual-token reducer, by share of the tokens kept.

    scripts/measure/bench_reducers.py --split validation --per-family 30  try it
    scripts/measure/bench_reducers.py                         all of it; goes on from ROWS; writes eval/reducers.json
    scripts/measure/bench_reducers.py --summarise             figures of what there is so far
    scripts/measure/bench_reducers.py --render                the docs' table, from eval/reducers.json
    scripts/measure/bench_reducers.py --render --plot FILE.svg  README's picture of demo-photo

All questions of the split that have images are asked greedily by `reduced_answers.py`, with each reducer attached to the
transformers model; text-only prompts pass a reducer untouched. Methods whose count is fixed, or learned for a share from the
calibration split, are asked at five shares, `random` with several seeds; those that decide the count themselves at settings
of their own, and their share is what they kept on average. Where a default does not fit models this small it is scaled
before anything is measured: VScan's shallow layer to a quarter of the encoder and its window to a third of the grid or less.
demo-photo is asked where `scripts/train/assemble_demo_photo.py` has put it together, also about photographs alone, as the
model `demo-photographs`. With `--groups` and `--shares` only these rows are measured, besides `random`; figures take the place
of those in eval/reducers.json. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import paired
import reduced_answers
import reducers_table
import torch
from reduced_answers import Asker

from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.models.data import Sample, bundled_data, encode, load_samples
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.choice import ReducerChoice, make_choice
from vlmcompress.reduction.hooks.learning import learn_thresholds
from vlmcompress.reduction.support import family_problem

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "reducers.json"
MODELS = {name: ROOT / "eval" / "demo" / name for name in ("demo-llava", "demo-qwen")} | {
    name: ROOT / "build" / "demo-photo" for name in ("demo-photo", "demo-photographs")
}
SHARES = (0.5, 0.25, 1 / 9, 0.75, 1 / 3)  # the most asked for first
SEEDS = 5
CALIBRATION = 128  # samples that DyMU's thresholds and levels are learned from
AT_SHARES: dict[str, list[dict[str, Any]]] = {  # method -> its variants
    "uniform": [{}],
    "random": [{"seed": seed} for seed in range(SEEDS)],
    "coverage": [{}, {"merge": "nearest"}],
    "learned": [{}],
    "dart": [{}, {"pivots": 4}],
    "divprune": [{}, {"merge": "nearest"}],
    "fastv": [{}],
    "dart-llm": [{}],
    "relevance": [{}],
    "visionzip": [{}],
    "vscan": [{"shallow": 1, "window": 3}, {"shallow": 3, "window": 4}],
    "dymu": [{}],
}
VSCAN = {"demo-photo": 3}  # its shallow layer; 1 in the other models
OWN_COUNT: dict[str, list[dict[str, Any]]] = {
    "dyrate": [{}],
    "litevlm": [{"keep": 0.5}],
    "pool": [{"window": window} for window in ("1x2", "2x2", "3x3")],
}


@dataclass(frozen=True)
class Setting:
    """A reducer, or none; `group`: its row of the table, without share and seed."""

    chosen: ReducerChoice | None
    group: str

    @property
    def key(self) -> str:
        return str(self.chosen or "full")


def settings() -> list[Setting]:
    """List all settings, the most useful ones first (`_later`)."""
    rows = [Setting(None, "full")]
    for share in SHARES:
        for method, variants in AT_SHARES.items():
            for options in variants:
                output = {} if method in ("random", "vscan") else options
                rows.append(Setting(make_choice(method, {"keep": share, **options}, "setting"), _group(method, output)))
        if share == SHARES[0]:
            for method, variants in OWN_COUNT.items():
                rows += [Setting(make_choice(method, options, "setting"), method) for options in variants]
    return sorted(rows, key=_later)


def _later(setting: Setting) -> bool:
    """Whether a setting comes later: further seeds, and variants at other than the first two shares."""
    if setting.chosen is None or setting.chosen.method in OWN_COUNT:
        return False
    variant = setting.group != setting.chosen.method and setting.chosen.reducer.keep not in SHARES[:2]
    return variant or getattr(setting.chosen.reducer, "seed", 0) > 1


def _group(method: str, options: dict[str, Any]) -> str:
    return " ".join([method, *(f"{name}={value}" for name, value in options.items())])


def questions_of(model: str, split: str) -> Path | None:
    """The file of a model's questions: the data that go with its name."""
    return bundled_data(MODELS[model].with_name(model), split)


def askable(split: str) -> list[str]:
    """The models that have questions of a split here."""
    return [name for name in MODELS if questions_of(name, split)]


def samples(model: str, split: str, per_family: int | None) -> list[Sample]:
    """Choose the first `per_family` questions of each family with images, all for None."""
    chosen, counts = [], dict[str | None, int]()
    for sample in load_samples(questions_of(model, split), samples=None, seed=0, decode_images=False):
        counts[sample.family] = 1 + counts.get(sample.family, 0)
        if sample.images and (per_family is None or counts[sample.family] <= per_family):
            chosen.append(sample)
    return chosen


def measure(args: argparse.Namespace) -> None:
    """Append a row for every setting that ROWS lacks and that the models take."""
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["model"], row["reduce"]) for row in kept_rows(args)}
    askers: dict[str, Asker] = {}
    for setting in settings():
        for model in args.models:
            if (model, setting.key) in done or not _included(setting, args):
                continue
            if model not in askers:
                vlm = models.load(MODELS[model])
                questions = reduced_answers.prepare(vlm, samples(model, args.split, args.per_family))
                askers[model] = Asker(vlm, questions)
            if setting.chosen and family_problem(askers[model].vlm.spec, setting.chosen.method):
                continue
            if setting.group == "vscan" and setting.chosen.reducer.shallow != VSCAN.get(model, 1):
                continue
            if setting.group.startswith("learned") and not args.scorers:
                continue
            start = time.process_time()
            row = describe(askers[model], setting, model, args) | {"seconds": round(time.process_time() - start, 1)}
            row = {"model": model, "split": args.split, "per_family": args.per_family} | row
            with args.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            output = f"{100 * row['exact'].count('1') / len(row['exact']):.2f}% of {row['after'] / row['before']:.3f}"
            print(f"{time.strftime('%H:%M:%S')} {model} {setting.key}: {output}", file=sys.stderr, flush=True)


def _included(setting: Setting, args: argparse.Namespace) -> bool:
    """Whether `--groups` and `--shares` leave a setting in; the model without a reducer always is."""
    if setting.key == "full":
        return True
    keep = setting.chosen.reducer.keep if setting.chosen else None
    grouped = not args.groups or setting.group in (*args.groups, "random")
    return grouped and (not args.shares or keep is None or any(abs(keep - share) < 1e-3 for share in args.shares))


def describe(asker: Asker, setting: Setting, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Ask all questions and make the row. `exact` has a letter a question, 1 for right; `cached` is the share of the visual
    rows that the caches of all blocks hold."""
    chosen, layers = setting.chosen, asker.vlm.model.config.get_text_config().num_hidden_layers
    if chosen and chosen.reducer.scorer is not None:
        scorer = str(args.scorers / f"{model}.safetensors")
        chosen = ReducerChoice(chosen.method, replace(chosen.reducer, scorer=scorer))  # type: ignore[call-arg]
        chosen = scorer_file.load_scorer(asker.vlm.model.config, chosen)
    if chosen and chosen.reducer.needs_thresholds:
        learning = load_samples(bundled_data(MODELS[model], "calibration"), samples=CALIBRATION, seed=0)
        chosen = learn_thresholds(asker.vlm, encode(learning, asker.vlm), chosen)
    answers = asker.ask(chosen)
    before, after = int(answers.before.sum()), int(answers.after.sum())
    held = int(answers.held.sum()) / layers
    row: dict[str, Any] = {"reduce": setting.key, "group": setting.group}
    if chosen:
        row |= {"method": chosen.method, "options": chosen.reducer.settings(), "stage": chosen.reducer.STAGE}
        row["seed"] = getattr(chosen.reducer, "seed", 0)
    row |= {"before": before, "after": after, "cached": held / before}
    return row | {"exact": "".join(map(str, answers.exact.int().tolist()))}


def kept_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows measured so far on these questions."""
    questions = (args.split, args.per_family)
    return [row for row in paired.rows(args.rows) if (row["split"], row["per_family"]) == questions]


def flags(parser: argparse.ArgumentParser, results: Path, per_family: int | None = None) -> None:
    """Add the flags of a script that asks these questions, keeps a row of answers a setting, and writes figures of the rows."""
    rows = Path("out") / f"{results.stem}.jsonl"
    parser.add_argument("--rows", type=Path, default=rows, help="where answers are kept, a row a setting")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    default = per_family or "all"
    parser.add_argument(
        "--per-family", type=int, default=per_family, help=f"questions of each kind; default: {default}"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: all that are there")
    parser.add_argument("--summarise", action="store_true", help="measure nothing, write RESULTS from ROWS as it is")
    parser.add_argument("--render", action="store_true", help="print the docs' tables of RESULTS")
    parser.add_argument("--results", type=Path, default=results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags(parser, RESULTS)
    parser.add_argument("--groups", nargs="+", metavar="ROW", help="rows of the table to measure; default: all")
    parser.add_argument(
        "--scorers",
        type=Path,
        metavar="DIR",
        help="folder with MODEL.safetensors of `vlmcompress learn-reducer` for each model, for the rows of `learned`",
    )
    parser.add_argument("--shares", nargs="+", type=float, metavar="SHARE", help="shares to measure; default: all")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curves of demo-photo in RESULTS")
    args = parser.parse_args()
    args.models = args.models or askable(args.split)
    quiet_libraries()
    torch.set_num_threads(1)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    if not args.render:
        if not args.summarise:
            measure(args)
        questions = {model: samples(model, args.split, args.per_family) for model in args.models}
        results = reducers_table.joined(results, reducers_table.summarise(kept_rows(args), questions))
        args.results.write_text(reducers_table.dump(results))
    if args.plot:
        args.plot.write_text(reducers_table.plot(results, "demo-photo"))
    print(reducers_table.render(results))
    print(json.dumps(results["full"]))


if __name__ == "__main__":
    main()
