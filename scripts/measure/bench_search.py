#!/usr/bin/env python
"""What `vlmcompress search` finds and what it saves, against a grid of candidates that are all asked to the end in vLLM.

    scripts/measure/bench_search.py --models demo-llava --questions 450 --test 1500     half an hour of two cores
    scripts/measure/bench_search.py --render               the docs' table, from eval/search.json

Every combination of `WEIGHTS` and `IMAGES` is made and asked all of the validation questions, once; answers stay in WORK, so a
run that was stopped goes on. Searches are then run on these recorded answers, with five seeds that shuffle the questions, under
several floors, and compared with the candidate that the whole grid would choose by the same rule. Each search's winner is
confirmed on the test questions. Gains are requests a second on an A100 as `vlmcompress plan` models them, since what answering
takes on a CPU is mostly noise with models this small; the best of the quantizations alone, of the reductions alone and of all
together are served in vLLM here, against the original, at the end (`--speed`). Rows of models that are not asked stay as they
are. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

from vlmcompress.cli._process import quiet_libraries
from vlmcompress.evaluation.accuracy.compare import compare, divergence
from vlmcompress.evaluation.search.candidate import Candidate, Choice, Factor, combined, singles
from vlmcompress.evaluation.search.posterior import Evidence
from vlmcompress.evaluation.search.speed import STAND_IN, Load, Measured, Modelled
from vlmcompress.evaluation.search.successive_halving import LIKELY, Rules, SuccessiveHalving, Trial
from vlmcompress.evaluation.search.trial import Setup, evaluate_candidate
from vlmcompress.models.data.sources import bundled
from vlmcompress.utils.text import points, times

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "eval" / "demo"
SMOL = ROOT / "build" / "demo-smol"  # scripts/train/assemble_demo_smol.py puts it there
RESULTS = ROOT / "eval" / "search.json"
FLOORS = (0.01, 0.02, 0.03, 0.05)
SEEDS = 5
TARGET, TYPICAL = "a100", Load(image=(224, 224), text=64, out=4)  # what the demo models' questions are like
WEIGHTS = (
    Choice("int8", {"scheme": "int8"}),
    Choice("int8 with tower", {"scheme": "int8", "vision": "int8"}),
    Choice("gptq-plus g64", {"scheme": "gptq-plus", "options": {"group_size": 64}}),
    Choice("awq g64", {"scheme": "awq", "options": {"group_size": 64}}),
)
IMAGES = (
    "coverage:0.75",
    "coverage:0.5,merge=nearest",
    "coverage:1/3,merge=nearest",
    "coverage:0.25,merge=nearest",
    "divprune:0.5",
    "pool",
)
FEWER = {"int8", "int8 with tower", "coverage:0.75", "coverage:0.5,merge=nearest", "coverage:0.25,merge=nearest"}


def space(model: str) -> list[Factor]:
    """The space of a model; that of demo-smol is smaller, as a candidate of its takes minutes."""
    factors = [Factor("weights", WEIGHTS), Factor("images", tuple(Choice(name, {"reduce": name}) for name in IMAGES))]
    if model != SMOL.name:
        return factors
    return [
        Factor(factor.name, tuple(choice for choice in factor.choices if choice.name in FEWER)) for factor in factors
    ]


def every(model: str) -> list[Candidate]:
    """The original first, then each candidate of the grid."""
    factors = space(model)
    return [Candidate(), *singles(factors), *combined(factors)]


def setup(model: str, work: Path, split: str) -> Setup:
    """The setup of trials on a split; checkpoints are shared by both splits."""
    calibrate = {"data": str(questions(model, "calibration")), "samples": 64}
    base = {"model": str(folder(model)), "target": "cpu", "calibrate": calibrate}
    return Setup(base, "world", str(questions(model, split)), 0, "vllm", work / model)


def folder(model: str) -> Path:
    """Where a model is; the one with a real language model is put together on demand."""
    return SMOL if model == SMOL.name else DEMO / model


def questions(model: str, split: str) -> Path:
    """The file of a model's questions; demo-smol answers those of demo-llava."""
    file = bundled(DEMO / ("demo-llava" if model == SMOL.name else model), split)
    assert file is not None
    return file


def grid(model: str, work: Path, split: str, count: int, candidates: Sequence[Candidate]) -> dict[str, dict[str, Any]]:
    """Ask those of the `candidates`, the original among them, that WORK has no answers of.

    Returns by name: scores, divergences and images by question.
    """
    file = work / f"{model}-{split}.json"
    rows: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    lacking = [each for each in candidates if each.name not in rows]
    if not lacking:
        return rows
    about = setup(model, work, split)
    before = evaluate_candidate(about, Candidate(), count)  # all others' divergences are from its answers
    for candidate in lacking:
        began = time.monotonic()
        answers = evaluate_candidate(about, candidate, count) if candidate.choices else before
        pairs = list(zip(before.suite.samples, answers.suite.samples, strict=True))
        _, moved = divergence([old.answer.first for old, _ in pairs], [new.answer.first for _, new in pairs])
        rows[candidate.name] = {
            "scores": {new.id: new.score for _, new in pairs},
            "kl": {new.id: kl for (_, new), kl in zip(pairs, moved, strict=True)},
            "images": {old.id: old.image for old, _ in pairs},
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows))
        right = statistics.fmean(rows[candidate.name]["scores"].values())
        print(
            f"{time.strftime('%H:%M:%S')} {model} {split} {candidate.name}: {100 * right:.1f}%, "
            f"{time.monotonic() - began:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return rows


@dataclass
class Recorded:
    """Trials whose answers are in a grid already, asked in an order of their own."""

    rows: Mapping[str, Mapping[str, Any]]
    gains: Mapping[str, float]
    order: Sequence[str]

    def ask(self, candidates: Sequence[Candidate], questions: int) -> dict[str, Trial]:
        """See `successive_halving.Trials`."""
        return {
            candidate.name: Trial(self.evidence(candidate.name, questions), self.gains[candidate.name])
            for candidate in candidates
        }

    def evidence(self, name: str, questions: int) -> Evidence:
        """The first answers of a candidate."""
        row, before = self.rows[name], self.rows[Candidate().name]
        chosen = self.order[:questions]
        differences = [row["scores"][question] - before["scores"][question] for question in chosen]
        moved = [row["kl"][question] for question in chosen if row["kl"][question] is not None]
        return Evidence(
            differences, [before["images"][question] for question in chosen], statistics.fmean(moved) if moved else None
        )

    def gain(self, candidate: Candidate) -> float | None:
        """See `successive_halving.Trials`."""
        return self.gains[candidate.name]

    def measured(self, candidates: Sequence[Candidate]) -> dict[str, float]:
        """See `successive_halving.Trials`."""
        return {}


def modelled(model: str, work: Path) -> dict[str, float]:
    """The gain of every candidate in requests a second on a target, by name."""
    about = setup(model, work, "validation")
    about = dataclasses.replace(about, base={**about.base, "target": TARGET})
    gains = Modelled(about, "throughput", TYPICAL)
    return {candidate.name: gains.gain(candidate) or 1.0 for candidate in every(model)}


def replay(model: str, work: Path, floors: Sequence[float], confirming: int) -> list[dict[str, Any]]:
    """Searches on the recorded grid, by floor; winners will be confirmed on so many questions."""
    rows = json.loads((work / f"{model}-validation.json").read_text())
    gains, factors, names = modelled(model, work), space(model), sorted(rows[Candidate().name]["scores"])
    suite, candidates = len(names), len(gains) - 1
    evidence = Recorded(rows, gains, names).evidence(Candidate().name, suite)
    images = confirming * evidence.mean.images / suite  # if the other questions share images as these do
    to_the_end = {"first": suite, "joint": candidates, "finalists": candidates}
    rows_by_floor = []
    for floor in floors:
        full = SuccessiveHalving(factors, Recorded(rows, gains, names), Rules(floor, suite, images, **to_the_end))
        best = full.run()
        searches = []
        for seed in range(SEEDS):
            order = list(names)
            random.Random(seed).shuffle(order)
            halving = SuccessiveHalving(factors, Recorded(rows, gains, order), Rules(floor, suite, images))
            winner = halving.run()
            searches.append(
                {
                    "winner": winner.candidate.name if winner else None,
                    "gain": winner.gain if winner else 1.0,
                    "saved": candidates * suite / halving.questions_asked,
                }
            )
        gain = best.gain if best else 1.0
        kinds = {factor.name: _alone(full, factor) for factor in factors}
        rows_by_floor.append(
            {
                "model": model,
                "floor": floor,
                "questions": suite,
                "confirming": confirming,
                "grid": {"winner": best.candidate.name if best else None, "gain": gain, "candidates": candidates},
                "alone": kinds,
                "regret": statistics.fmean(max(gain - search["gain"], 0.0) / gain for search in searches),
                "saved": statistics.median(search["saved"] for search in searches),
                "searches": searches,
            }
        )
    return rows_by_floor


def _alone(halving: SuccessiveHalving, factor: Factor) -> dict[str, Any]:
    """The candidate worth most of those that change one thing alone and are likely to be confirmed, if there is one."""
    names = {choice.name for choice in factor.choices}
    tried = [
        standing
        for name, standing in halving.standings.items()
        if name in names and standing.gain > 1 and standing.chance >= LIKELY
    ]
    best = max(tried, key=lambda standing: standing.worth, default=None)
    return {"winner": best.candidate.name if best else None, "gain": best.gain if best else 1.0}


def confirmed(model: str, work: Path, results: list[dict[str, Any]], count: int) -> None:
    """Ask the winners, and the best single changes, the test questions, and add the verdicts."""
    names = {choice["winner"] for row in results for choice in (row["grid"], *row["searches"], *row["alone"].values())}
    candidates = [choice for choice in every(model) if not choice.choices or choice.name in names]
    rows = grid(model, work, "test", count, candidates)
    before = rows[Candidate().name]
    for row in results:
        for choice in (row["grid"], *row["searches"], *row["alone"].values()):
            if choice["winner"] is None:
                continue
            scores = rows[choice["winner"]]["scores"]
            pair = compare(
                list(before["scores"].values()),
                [scores[name] for name in before["scores"]],
                [before["images"][name] for name in before["scores"]],
                margin=row["floor"],
            )
            choice |= {"test": pair.difference, "low": pair.low, "high": pair.high, "verdict": pair.verdict}


def pq_rows(file: Path) -> int:
    """Rows of a parquet file."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(file).metadata.num_rows


def served(model: str, work: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Serve the winners of these rows and the best single changes against the original, and add the ratios."""
    about = setup(model, work, "validation")
    typical = Modelled(about, "throughput", Load(requests=64), STAND_IN)
    measured = Measured(typical, str(questions(model, "validation")))
    by_name, ratios = {choice.name: choice for choice in every(model)}, dict[str, dict[str, float]]()
    for choice in (choice for row in rows for choice in (row["grid"], *row["alone"].values()) if choice["winner"]):
        if choice["winner"] not in ratios:
            speed = measured.measure(by_name[choice["winner"]], lambda *_: None)
            ratios[choice["winner"]] = {"ratio": speed.ratio, "low": speed.low, "high": speed.high}
            shown = f"{model} {choice['winner']}: {times(speed.ratio)} requests a second"
            print(time.strftime("%H:%M:%S"), shown, file=sys.stderr, flush=True)
        choice["served"] = ratios[choice["winner"]]


def render(data: Mapping[str, Any]) -> str:
    """The docs' table."""
    heads = ("model", "floor", "grid", "quantized alone", "reduced alone", "the grid's choice", "on test questions")
    heads += ("regret", "saved", "confirmed")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in data["rows"]:
        best = row["grid"]
        winners = [search for search in row["searches"] if search["winner"]]
        cells = [
            row["model"],
            f"{100 * row['floor']:g}",
            f"{best['candidates']} x {row['questions']}",
            *(_shown(row["alone"][kind]) for kind in ("weights", "images")),
            _shown(best),
            _change(best) if best["winner"] else "",
            f"{100 * row['regret']:.0f}%",
            f"{row['saved']:.1f}x" if math.isfinite(row["saved"]) else "",
            f"{sum(search['verdict'] == 'pass' for search in winners)} of {len(winners)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _change(choice: Mapping[str, Any]) -> str:
    """A winner's difference on the test questions, in points, and the verdict."""
    return f"{points(choice['test'])} ({points(choice['low'])} to {points(choice['high'])}), {choice['verdict']}"


def _shown(choice: Mapping[str, Any]) -> str:
    """A winner and what it gains, modelled, and in a server where that was measured."""
    if choice["winner"] is None:
        return "none"
    shown = f"{choice['winner']}: {times(choice['gain'])}"
    return f"{shown}, served {times(choice['served']['ratio'])}" if "served" in choice else shown


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "search", help="answers and checkpoints")
    parser.add_argument("--models", nargs="+", default=["demo-llava", "demo-qwen", "demo-smol"])
    parser.add_argument("--questions", type=int, default=900, metavar="N", help="of the validation split; default: 900")
    parser.add_argument("--test", type=int, metavar="N", help="of the test split; default: all")
    parser.add_argument(
        "--speed", type=float, nargs="*", default=[], metavar="FLOOR", help="floors whose winners are served"
    )
    parser.add_argument("--render", action="store_true", help="print the docs' table of RESULTS")
    args = parser.parse_args()
    if args.render:
        data = json.loads(RESULTS.read_text())
        print(f"{render(data)}\n{_last(data['rows'])}")
        return
    quiet_libraries()
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if row["model"] not in args.models]
    for model in args.models:
        grid(model, args.work, "validation", args.questions, every(model))
        confirming = args.test or pq_rows(questions(model, "test"))
        replayed = replay(model, args.work, FLOORS, confirming)
        confirmed(model, args.work, replayed, confirming)
        served(model, args.work, [row for row in replayed if row["floor"] in args.speed])
        rows += replayed
    data = {"seeds": SEEDS, "rows": sorted(rows, key=lambda row: (row["model"], row["floor"]))}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    print(render(data))
    print(_last(rows))


def _last(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last line: regret and questions saved, by model and floor."""
    return json.dumps({"rows": [[row["model"], row["floor"], row["regret"], row["saved"]] for row in rows]})


if __name__ == "__main__":
    main()
