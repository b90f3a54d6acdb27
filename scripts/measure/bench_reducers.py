#!/usr/bin/env python
"""Accuracy of the demo models with every visual-token reducer, by family of question and share of the tokens kept.

    scripts/measure/bench_reducers.py --split validation --per-family 30  try it
    scripts/measure/bench_reducers.py                         all of it; goes on from ROWS
    scripts/measure/bench_reducers.py --summarise             figures of what there is so far
    scripts/measure/bench_reducers.py --speed 3               prefill time and cache (`reducers_speed.py`), three rounds
    scripts/measure/bench_reducers.py --render --plot FILE.svg  the docs' tables and the curves, from eval/reducers.json

Figures go to eval/reducers.json. All questions of the split that have images are asked (text-only prompts pass a reducer
untouched), greedily, by `reduced_answers.py`, with each reducer attached to the transformers model. Methods whose count is
fixed, or learnt for a share, as DyMU's thresholds are, from the calibration split, are asked at five shares; those that decide
the count themselves at settings of their own, and their share is what they kept on average; so are images that are made
smaller (`resize`), alone and before `coverage`, where the family's processor can. `random` is asked with several
seeds. Where a default does not fit models this small, it is scaled before anything is measured: VScan's shallow layer to a
quarter of the encoder and its window to a third of the grid; FastV and DART also one layer earlier than published, as layer 2
is half of these models. DART on projected tokens is asked with the published 4 pivots, too. With `--groups`, and `--shares`,
only these rows of the table are measured anew, besides `random`, and take the place of those in eval/reducers.json. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import reduced_answers
import reducers_plot
import reducers_speed
import reducers_table
import torch
from reduced_answers import Asker, Found

from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.models.data import Sample, bundled, encode, load_samples
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.choice import ReducerChoice, choose
from vlmcompress.reduction.hooks import resizing
from vlmcompress.reduction.hooks.learning import learn
from vlmcompress.reduction.resize import Resize
from vlmcompress.reduction.support import family_refusal

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "eval" / "demo"
RESULTS = ROOT / "eval" / "reducers.json"
MODELS = ("demo-llava", "demo-qwen")
SHARES = (0.5, 0.25, 1 / 9, 0.75, 1 / 3)  # the most asked for first
SEEDS = 5
CALIBRATION = 128  # samples that DyMU's thresholds and levels are learnt from
AT_SHARES: dict[str, list[dict[str, Any]]] = {  # method -> its variants
    "uniform": [{}],
    "random": [{"seed": seed} for seed in range(SEEDS)],
    "coverage": [{}, {"merge": "nearest"}],
    "learned": [{}, {"merge": "nearest"}],
    "cdpruner": [{}],
    "scope": [{}],
    "dart": [{}, {"pivots": 4}],
    "divprune": [{}, {"merge": "nearest"}],
    "fastv": [{}, {"layer": 1}],
    "dart-llm": [{}, {"layer": 1}],
    "pyramiddrop": [{}],
    "relevance": [{}],
    "visionzip": [{}],
    "vscan": [{"shallow": 1, "window": 3}],
    "tome": [{}],
    "dymu": [{}],
}
ABOVE = {
    "pyramiddrop": 0.25
}  # shares must be larger, as the first of four stages, one block of these models, drops nothing
OWN_COUNT: dict[str, list[dict[str, Any]]] = {
    "dyrate": [{"factor": factor} for factor in (4.0, 2.0, 1.0, 0.5)],
    "litevlm": [{"keep": 0.5}],
    "pool": [{"window": window} for window in ("1x2", "2x2", "3x3")],
}
RESIZED = (64, 49, 36, 25, 16)  # most tokens of an image; the demo world's have 81 and more


@dataclass(frozen=True)
class Setting:
    """A reducer, or none, behind images made smaller or not; `group`: its row of the table, without share and seed."""

    chosen: ReducerChoice | None
    group: str
    resize: Resize | None = None

    @property
    def key(self) -> str:
        return " + ".join(str(stage) for stage in (self.resize, self.chosen) if stage) or "full"


def settings() -> list[Setting]:
    """List all settings, the most useful ones first (`_later`)."""
    rows = [Setting(None, "full")]
    for share in SHARES:
        for method, variants in AT_SHARES.items():
            for options in variants if share > ABOVE.get(method, 0) else ():
                shown = {} if method in ("random", "vscan") else options
                rows.append(Setting(choose(method, {"keep": share, **options}, "setting"), _group(method, shown)))
        if share == SHARES[0]:
            for method, variants in OWN_COUNT.items():
                rows += [Setting(choose(method, options, "setting"), method) for options in variants]
            rows += [Setting(None, "resize", Resize(tokens=tokens)) for tokens in RESIZED]
            rows += [
                Setting(choose("coverage", {"keep": share}, "setting"), "resize + coverage", Resize(tokens=tokens))
                for tokens in RESIZED[:2]
            ]
    return sorted(rows, key=_later)


def _later(setting: Setting) -> bool:
    """Whether a setting comes later: further seeds, and variants at other than the first two shares."""
    if setting.chosen is None or setting.resize or setting.chosen.method in OWN_COUNT:
        return False
    variant = setting.group != setting.chosen.method and setting.chosen.options.keep not in SHARES[:2]
    return variant or getattr(setting.chosen.options, "seed", 0) > 1


def _group(method: str, options: dict[str, Any]) -> str:
    return " ".join([method, *(f"{name}={value}" for name, value in options.items())])


def samples(model: str, split: str, per_family: int | None) -> list[Sample]:
    """Choose the first `per_family` questions of each family with images, all for None."""
    chosen, counts = [], dict[str | None, int]()
    for sample in load_samples(bundled(DEMO / model, split), samples=None, seed=0, check_images=False):
        counts[sample.family] = 1 + counts.get(sample.family, 0)
        if sample.images and (per_family is None or counts[sample.family] <= per_family):
            chosen.append(sample)
    return chosen


def measure(args: argparse.Namespace) -> None:
    """Append a row for every setting that ROWS lacks and that the models take."""
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["model"], row["reduce"]) for row in reducers_table.rows(args.rows, args.split, args.per_family)}
    askers: dict[str, Asker] = {}
    for setting in settings():
        for model in args.models:
            if (model, setting.key) in done or not _wanted(setting, args):
                continue
            if model not in askers:
                vlm = models.load(DEMO / model)
                questions = reduced_answers.prepare(vlm, samples(model, args.split, args.per_family))
                askers[model] = Asker(vlm, questions)
            if setting.chosen and family_refusal(askers[model].vlm.spec, setting.chosen.method):
                continue
            if setting.group.startswith("learned") and not args.scorers:
                continue
            if setting.resize and resizing.refusal(askers[model].vlm.spec):
                continue
            start = time.process_time()
            row = describe(askers[model], setting, model, args) | {"seconds": round(time.process_time() - start, 1)}
            row = {"model": model, "split": args.split, "per_family": args.per_family} | row
            with args.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = f"{100 * row['exact'].count('1') / len(row['exact']):.2f}% of {row['after'] / row['before']:.3f}"
            print(f"{time.strftime('%H:%M:%S')} {model} {setting.key}: {shown}", file=sys.stderr, flush=True)


def _wanted(setting: Setting, args: argparse.Namespace) -> bool:
    """Whether `--groups` and `--shares` leave a setting in; the model without a reducer always is."""
    if setting.key == "full":
        return True
    keep = setting.chosen.options.keep if setting.chosen and not setting.resize else None
    grouped = not args.groups or setting.group in (*args.groups, "random")
    return grouped and (not args.shares or keep is None or any(abs(keep - share) < 1e-3 for share in args.shares))


def describe(asker: Asker, setting: Setting, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Ask all questions and make the row. `exact` has a letter a question, 1 for right; `cached` is the share of the visual
    rows that the caches of all blocks hold. Of a method that drops at several blocks `after` is the mean over blocks, too."""
    chosen, layers = setting.chosen, asker.vlm.model.config.get_text_config().num_hidden_layers
    if chosen and chosen.options.scorer is not None:
        scorer = str(args.scorers / f"{model}.safetensors")
        chosen = ReducerChoice(chosen.method, replace(chosen.options, scorer=scorer))  # type: ignore[call-arg]
        chosen = scorer_file.known(asker.vlm.model.config, chosen)
    if chosen and chosen.options.unlearnt:
        learning = load_samples(bundled(DEMO / model, "calibration"), samples=CALIBRATION, seed=0)
        chosen = learn(asker.vlm, encode(learning, asker.vlm), chosen)
    answers = _ask(asker, setting, chosen, lambda: samples(model, args.split, args.per_family))
    before, after = int(answers.before.sum()), int(answers.after.sum())
    held = int(answers.held.sum()) / layers
    if chosen and len(chosen.options.drops(layers)) > 1:
        after = round(held)
    row: dict[str, Any] = {"reduce": setting.key, "group": setting.group}
    if setting.resize:
        row |= {
            "method": "resize",
            "options": setting.resize.model_dump() | {"then": str(chosen or "")},
            "stage": "processor",
        }
    elif chosen:
        row |= {"method": chosen.method, "options": chosen.options.settings(), "stage": chosen.module.STAGE}
        row["seed"] = getattr(chosen.options, "seed", 0)
        if chosen.module.COUNT == "adaptive":
            shares = (answers.after / answers.before).double()
            row["spread"] = shares.quantile(torch.tensor([0, 0.1, 0.5, 0.9, 1]).double()).tolist()
    row |= {"before": before, "after": after, "cached": held / before}
    return row | {"exact": "".join(map(str, answers.exact.int().tolist()))}


def _ask(asker: Asker, setting: Setting, chosen: ReducerChoice | None, questions: Callable[[], list[Sample]]) -> Found:
    """The answers of a setting; of smaller images, which are other inputs, with the tokens that there were before."""
    if setting.resize is None:
        return asker.ask(chosen)
    vlm = resizing.resized(asker.vlm, setting.resize)
    answers = Asker(vlm, reduced_answers.prepare(vlm, questions())).ask(chosen)
    return replace(answers, before=asker.visual())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=Path, default=Path("out/reducers.jsonl"), help="where answers are kept, a row a setting"
    )
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--per-family", type=int, help="questions of each of the nine families; default: all")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--groups", nargs="+", metavar="ROW", help="rows of the table to measure; default: all")
    parser.add_argument(
        "--scorers",
        type=Path,
        metavar="DIR",
        help="folder with MODEL.safetensors of `vlmcompress learn-reducer` for each model, for the rows of `learned`",
    )
    parser.add_argument("--shares", nargs="+", type=float, metavar="SHARE", help="shares to measure; default: all")
    parser.add_argument("--speed", type=int, metavar="ROUNDS", help="measure prefill time and cache instead")
    parser.add_argument("--layers", type=int, default=28, help="decoder blocks of the models for --speed")
    parser.add_argument("--summarise", action="store_true", help="measure nothing, write RESULTS from ROWS as it is")
    parser.add_argument("--render", action="store_true", help="print the docs' tables of RESULTS")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curves of RESULTS")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    if args.speed:
        methods = args.groups or reducers_speed.METHODS
        measured = reducers_speed.measure([DEMO / model for model in args.models], args.speed, args.layers, methods)
        results["speed"] = reducers_speed.joined(results.get("speed", ()), measured)
    elif args.summarise or not (args.render or args.plot):
        if not args.summarise:
            measure(args)
        questions = {model: samples(model, args.split, args.per_family) for model in args.models}
        measured = reducers_table.summarise(reducers_table.rows(args.rows, args.split, args.per_family), questions)
        if results and (args.groups or args.shares):
            measured = reducers_table.joined(results, measured)
        results = measured | {name: value for name, value in results.items() if name == "speed"}
    args.results.write_text(reducers_table.dump(results))
    measured = results
    if args.plot:
        args.plot.write_text(reducers_plot.draw(measured))
    print(reducers_table.render(measured))
    print(json.dumps(measured["findings"]))


if __name__ == "__main__":
    main()
