#!/usr/bin/env python
"""Check by simulated searches, whose truth is known, that a search keeps its floor, and what it finds for how many questions.

    scripts/measure/simulate_search.py                1,000 worlds, three floors; a few minutes
    scripts/measure/simulate_search.py --save         also writes eval/search_simulated.json
    scripts/measure/simulate_search.py --render       prints the docs' tables from that file

A world is a grid of 5 schemes and 9 reducers with true losses and gains. The original answers 95% of the questions right, and
there are three questions an image. A candidate loses right answers and gets wrong ones right, more likely on questions and
images that are hard for all, and a combination's changes resemble those of its parts. Its loss is the sum of theirs times
something that the search does not know (1.1 on average, with a deviation of 0.25). A question's divergence is the larger the
nearer its answer is to changing, times a factor of the candidate's own (deviation 0.3 of its logarithm). 900 questions decide,
and the winner is asked 2,000 others once, by the test of `vlmcompress eval`. In worlds *at odds* with the search's model the
two deviations are 0.5 and 0.8.

Beside the search itself, the same worlds are searched without the divergence, by asking the whole grid all questions
("whole grid"), by taking the highest gain of the whole grid whose observed loss is within the floor ("no rule of chance"),
and by one who knows all true losses and takes what is worth most. The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from vlmcompress.evaluation.accuracy import noninferiority
from vlmcompress.evaluation.accuracy.paired import NORMAL
from vlmcompress.evaluation.search.candidate import Candidate, Choice, Factor, combined, singles
from vlmcompress.evaluation.search.posterior import ERROR, Evidence, Posterior, posteriors, worth
from vlmcompress.evaluation.search.successive_halving import Rules, Standing, SuccessiveHalving, Trial

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "search_simulated.json"
FLOORS = (0.01, 0.02, 0.03)
QUESTIONS, CONFIRMING, SHARED = 900, 2000, 3
RIGHT, LARGEST = 0.95, 0.6  # the original's accuracy, and the most that a candidate loses of it
STEEP, MOST = 4.5, 4.0
"""How steeply divergence rises with the deviate, and its largest value in nats: so that mean and 95th percentile at a loss are
about those that reducers have on the demo models in eval/accuracy.json."""
SCHEMES = {"int8": (0.0005, 1.25), "fp8": (0.001, 1.3), "awq": (0.004, 1.6), "rtn": (0.008, 1.6), "w3": (0.03, 1.8)}
"""Typical loss and gain."""
REDUCERS = {f"{name} {keep}": (loss * (1 + 0.5 * number), gain - 0.05 * number)
            for number, name in enumerate(("divprune", "vscan", "random"))
            for keep, loss, gain in (("1/2", 0.003, 1.4), ("1/4", 0.015, 1.9), ("1/9", 0.06, 2.4))}  # fmt: skip
FACTORS = tuple(Factor(name, tuple(Choice(choice_name, {name: choice_name}) for choice_name in names))
                for name, names in (("scheme", SCHEMES), ("reduce", REDUCERS)))  # fmt: skip
GRID = [*singles(FACTORS), *combined(FACTORS)]
METHODS = {
    "search": "the search",
    "no divergence": "without the divergence",
    "grid": "whole grid",
    "no chance": "whole grid, no rule of chance",
    "truth": "knows the true losses",
}
AT_ODDS = {"vary": 0.8, "unlike": 0.5}
ODD = ("search", "truth")
"""Methods that search worlds at odds with posteriors, too."""


@dataclass
class World:
    """Truth about all candidates of the grid, and their answers to the questions; `Trials` of a halving.

    Attributes:
        losses, gains: by name; a loss is a share.
        factors: of the divergence, which candidates have more of or less for the same loss; `vary`: the standard deviation
            of their logarithms.
        unlike: how much the loss of a combination differs from the sum of its parts', as a share of it.
    """

    rng: np.random.Generator
    vary: float = 0.3
    unlike: float = 0.25
    losses: dict[str, float] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    evidences: dict[tuple[str, int], Evidence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        typical = SCHEMES | REDUCERS
        for candidate in GRID:
            parts, name, noise = [choice.name for choice in candidate.choices], candidate.name, self.rng.normal(size=4)
            if len(parts) == 1:
                loss, gain = typical[name]
                self.losses[name] = min(loss * math.exp(0.6 * noise[0]) - 0.001 * abs(noise[1]), LARGEST)
                self.gains[name] = gain * math.exp(0.05 * noise[2])
                self.factors[name] = math.exp(self.vary * noise[3])
            else:
                total = math.fsum(self.losses[part] for part in parts)
                self.losses[name] = min(total + abs(total) * (0.1 + self.unlike * noise[0]), LARGEST)
                self.gains[name] = math.prod(self.gains[part] for part in parts) * math.exp(0.05 * noise[2])
                weights = [abs(self.losses[part]) for part in parts]
                mean = np.average([math.log(self.factors[part]) for part in parts], weights=weights)
                self.factors[name] = math.exp(mean + self.vary / 2 * noise[3])
        self.exam, self.final = Sheet(self.rng, QUESTIONS), Sheet(self.rng, CONFIRMING)

    def evidence(self, candidate: Candidate, questions: int) -> Evidence:
        """A candidate's answers to the first questions."""
        key = candidate.name, questions
        if key not in self.evidences:
            answers, divergences = self.exam.answers(candidate, self.losses[candidate.name])
            mean = float(divergences[:questions].mean()) * self.factors[candidate.name]
            self.evidences[key] = Evidence(answers[:questions], self.exam.images[:questions], mean)
        return self.evidences[key]

    def ask(self, candidates: Sequence[Candidate], questions: int) -> Mapping[str, Trial]:
        """Ask candidates; see `successive_halving.Trials`."""
        return {
            candidate.name: Trial(self.evidence(candidate, questions), self.gains[candidate.name])
            for candidate in candidates
        }

    def gain(self, candidate: Candidate) -> float:
        """The gain as it is predicted: that of a combination is the product of its parts'."""
        return math.prod(self.gains[choice.name] for choice in candidate.choices)

    def measured(self, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """The true gains."""
        return {candidate.name: self.gains[candidate.name] for candidate in candidates}

    def confirmed(self, candidate: Candidate, floor: float) -> str:
        """The verdict of `vlmcompress eval` on questions of their own."""
        answers = self.final.answers(candidate, self.losses[candidate.name])[0]
        return noninferiority.verdict(Evidence(answers, self.final.images, None).mean, floor, 1 - 2 * ERROR)


@dataclass
class Blind:
    """A world that does not show divergences."""

    world: World

    def ask(self, candidates: Sequence[Candidate], questions: int) -> Mapping[str, Trial]:
        """Ask candidates."""
        trials = self.world.ask(candidates, questions)
        return {
            name: replace(trial, evidence=replace(trial.evidence, divergence=None)) for name, trial in trials.items()
        }

    def gain(self, candidate: Candidate) -> float:
        """See `World.gain`."""
        return self.world.gain(candidate)

    def measured(self, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """See `World.measured`."""
        return self.world.measured(candidates)


class Sheet:
    """Questions, and how hard each is for each candidate: a normal deviate, which three tenths of its variance have from the
    question, two from the image, and the rest from the choices and the combination."""

    def __init__(self, rng: np.random.Generator, questions: int) -> None:
        self.rng, self.questions = rng, questions
        images = np.repeat(np.arange(-(-questions // SHARED)), SHARED)[:questions]
        self.images = images.tolist()
        self.right = rng.random(questions) < RIGHT
        shared = rng.normal(size=questions) * math.sqrt(0.3)
        self.common = shared + (rng.normal(size=images[-1] + 1) * math.sqrt(0.2))[images]
        self.own: dict[str, np.ndarray] = {}

    def answers(self, candidate: Candidate, loss: float) -> tuple[np.ndarray, np.ndarray]:
        """A candidate's score minus the original's on each question, with a mean of -loss in the long run, and its divergences.

        These are about a nat where an answer is about to change, and fall steeply with the distance from there, as measured:
        the median is a thousandth of the mean.
        """
        churn = 0.0005 + 0.15 * abs(loss)
        worse, better = churn + max(loss, 0.0), churn + max(-loss, 0.0)
        deviates = self.common + math.sqrt(0.5) * self._own(candidate)
        lost = NORMAL.inv_cdf(worse / RIGHT) - deviates
        won = NORMAL.inv_cdf(min(better / (1 - RIGHT), 0.999)) + deviates
        changed = np.where(self.right, lost, won)
        divergences = np.exp(np.minimum(STEEP * lost, math.log(MOST)))
        return np.sign(changed) * (changed > 0) * np.where(self.right, -1.0, 1.0), divergences

    def _own(self, candidate: Candidate) -> np.ndarray:
        if candidate.name not in self.own:
            drawn = self.rng.normal(size=self.questions)
            if len(candidate.choices) > 1:
                parts = [self._own(Candidate((choice,))) for choice in candidate.choices]
                drawn = (drawn + np.sum(parts, axis=0)) / math.sqrt(1 + len(parts))
            self.own[candidate.name] = drawn
        return self.own[candidate.name]


@dataclass(frozen=True)
class Outcome:
    """How one search went. `got`: the gain in the end, 1 where no winner was confirmed; `best`: of all that keep the floor."""

    won: bool
    confirmed: bool
    broken: bool
    chance: float
    got: float
    best: float
    questions: int
    kept: int = 0
    refuted: int = 0

    @property
    def regret(self) -> float:
        """The share of the best gain that was missed."""
        return max(1 - self.got / self.best, 0.0)


def outcome(world: World, floor: float, winner: Standing | None, questions: int) -> Outcome:
    """Confirm a winner, and compare with the truth."""
    best = max(
        (world.gains[candidate.name] for candidate in GRID if world.losses[candidate.name] <= floor), default=1.0
    )
    if winner is None:
        return Outcome(False, False, False, 0.0, 1.0, max(best, 1.0), questions)
    name = winner.candidate.name
    passed = world.confirmed(winner.candidate, floor) == "pass"
    broken = passed and world.losses[name] > floor
    got = world.gains[name] if passed else 1.0
    return Outcome(True, passed, broken, winner.chance, got, max(best, 1.0), questions)


def searches(world: World, floor: float, methods: Sequence[str] = tuple(METHODS)) -> dict[str, Outcome]:
    """Search a world by each method."""
    rules = Rules(floor, QUESTIONS, CONFIRMING / SHARED)
    outcomes: dict[str, Outcome] = {}
    for method in methods:
        halving = SuccessiveHalving(FACTORS, Blind(world) if method == "no divergence" else world, rules)
        if method in ("search", "no divergence"):
            result = outcome(world, floor, halving.run(), halving.questions_asked)
            kept = [name for name in halving.standings if world.losses[name] <= floor]
            out = [name for name in kept if halving.standings[name].out.startswith("loses more")]
            outcomes[method] = replace(result, kept=len(kept), refuted=len(out))
        else:
            winner = CHOOSING[method](world, halving)
            outcomes[method] = outcome(world, floor, winner, 0 if method == "truth" else len(GRID) * QUESTIONS)
    return outcomes


def by_grid(world: World, halving: SuccessiveHalving) -> Standing | None:
    """The candidate that is worth most after all questions."""
    evidence = {candidate.name: world.evidence(candidate, QUESTIONS) for candidate in GRID}
    believed = posteriors(evidence, halving.rules.margin)
    return _best(
        Standing(
            candidate,
            world.gains[candidate.name],
            chance=halving.chance(believed[candidate.name], evidence[candidate.name]),
        )
        for candidate in GRID
    )


def by_observation(world: World, halving: SuccessiveHalving) -> Standing | None:
    """The highest gain whose observed loss is within the floor."""
    differences = {candidate.name: world.evidence(candidate, QUESTIONS).differences for candidate in GRID}
    within = [candidate for candidate in GRID if float(np.mean(differences[candidate.name])) >= -halving.rules.margin]
    return _best(Standing(candidate, world.gains[candidate.name], chance=1.0) for candidate in within)


def by_truth(world: World, halving: SuccessiveHalving) -> Standing | None:
    """What is worth most to one who knows all losses."""
    chances = {candidate.name: halving.chance(Posterior(-world.losses[candidate.name], 0.0)) for candidate in GRID}
    return _best(Standing(candidate, world.gains[candidate.name], chance=chances[candidate.name]) for candidate in GRID)


CHOOSING = {"grid": by_grid, "no chance": by_observation, "truth": by_truth}


def _best(standings: Iterable[Standing]) -> Standing | None:
    return max(
        (standing for standing in standings if standing.gain > 1),
        key=lambda standing: worth(standing.gain, standing.chance),
        default=None,
    )


def interval(count: int, runs: int) -> tuple[float, float]:
    """The exact 95% interval of a rate (Clopper and Pearson, Biometrika 26, 1934), by bisection of binomial tails."""

    def at_most(k: int, p: float) -> float:
        logs = (math.lgamma(runs + 1) - math.lgamma(i + 1) - math.lgamma(runs - i + 1)
                + i * math.log(p) + (runs - i) * math.log1p(-p) for i in range(k + 1))  # fmt: skip
        return math.fsum(math.exp(log) for log in logs)

    def solve(k: int, tail: float) -> float:
        low, high = 1e-12, 1 - 1e-12
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(k, middle) > tail else (low, middle)
        return (low + high) / 2

    return (solve(count - 1, 0.975) if count else 0.0), (solve(count, 0.025) if count < runs else 1.0)


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Rates over the runs of one method at one floor."""
    runs, broken = len(outcomes), sum(outcome.broken for outcome in outcomes)
    regrets = [outcome.regret for outcome in outcomes]
    kept = sum(outcome.kept for outcome in outcomes)
    return {
        "broken": broken / runs,
        "broken_interval": interval(broken, runs),
        "confirmed": sum(outcome.confirmed for outcome in outcomes) / runs,
        "expected": sum(outcome.chance for outcome in outcomes) / runs,
        "gain": float(np.mean([outcome.got for outcome in outcomes])),
        "best": float(np.mean([outcome.best for outcome in outcomes])),
        "regret_median": float(np.median(regrets)),
        "regret_90": float(np.quantile(regrets, 0.9)),
        "asked": float(np.mean([outcome.questions for outcome in outcomes])) / (len(GRID) * QUESTIONS),
        "refuted": sum(outcome.refuted for outcome in outcomes) / kept if kept else None,
    }


def simulate(runs: int, seed: int) -> dict[str, Any]:
    """Search so many worlds by each method and at each floor."""
    outcomes: dict[float, dict[str, list[Outcome]]] = {floor: {} for floor in FLOORS}
    for run in range(runs):
        for odd in (False, True):
            world = World(np.random.default_rng([seed, run, odd]), **(AT_ODDS if odd else {}))
            for floor in FLOORS:
                for method, result in searches(world, floor, ODD if odd else tuple(METHODS)).items():
                    outcomes[floor].setdefault(f"{method}, at odds" if odd else method, []).append(result)
    rows = {f"{floor:g}": {method: summarise(some) for method, some in of.items()} for floor, of in outcomes.items()}
    return {"runs": runs, "seed": seed, "grid": len(GRID), "nominal": ERROR, "floors": rows}


def render(results: dict[str, Any]) -> str:
    """The docs' table."""
    lines = [
        "| floor, points | method | questions, of the whole grid's | a winner confirmed, of those expected "
        "| confirmed and breaks the floor, 95% | gain, of the best "
        "| missed of the best gain: median, 90% | thrown out and keeps the floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for floor, rows in results["floors"].items():
        for key, row in rows.items():
            method, _, odd = key.partition(", ")
            low, high = row["broken_interval"]
            cells = [
                f"{100 * float(floor):g}",
                METHODS[method] + (f", {odd}" if odd else ""),
                f"{row['asked']:.1%}" if row["asked"] else "–",
                f"{row['confirmed']:.1%}" + ("" if method == "no chance" else f" of {row['expected']:.1%}"),
                f"{row['broken']:.1%} ({low:.1%} to {high:.1%})",
                f"{row['gain']:.2f} of {row['best']:.2f}",
                f"{row['regret_median']:.0%}, {row['regret_90']:.0%}",
                "–" if row["refuted"] is None else f"{row['refuted']:.2%}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="simulated worlds; default 1000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write RESULTS")
    parser.add_argument("--render", action="store_true", help="print the docs' table of RESULTS")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default eval/search_simulated.json")
    args = parser.parse_args()
    results = json.loads(args.results.read_text()) if args.render else simulate(args.runs, args.seed)
    if args.save and not args.render:
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    print(render(results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
