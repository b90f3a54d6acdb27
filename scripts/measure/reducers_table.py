"""Turn the rows of `bench_reducers.py` into figures with intervals, findings and tables.

Differences are paired by question, with questions about the same images as a cluster. Those to the model without a reducer have
the interval of `vlmcompress eval` (`accuracy.compare`). Those to `random` take its seeds into account, too: a
seed is one choice of places for all images of a size, so the variance of the mean over seeds adds to that over questions
(`methods_table.difference`), and an interval is 1.96 standard errors to each side. `random` at a share at which it wasn't asked
is interpolated between its neighbours, question by question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import methods_table
import reducers_speed
import torch
from torch import Tensor

from vlmcompress.evaluation.accuracy.compare import compare
from vlmcompress.models.data import Sample

BEYOND = 1.96
POINT = 0.01
HALF = 0.5
SIMILAR = ("dart", "dart-llm", "divprune", "tome", "dymu")  # methods that drop or merge what is alike
MARKS = {
    "random": " o",
    "random_cached": " (o)",
}  # marks of reducers no better than random at as many tokens, or as much cache
Row = dict[str, Any]


def rows(path: Path, split: str, per_family: int | None) -> list[Row]:
    """Read the rows measured so far on these questions."""
    return [row for row in methods_table.rows(path) if (row["split"], row["per_family"]) == (split, per_family)]


def summarise(measured: Sequence[Row], questions: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Compute figures of every reducer at every share, and findings."""
    models = [
        Answers([row for row in measured if row["model"] == model], samples) for model, samples in questions.items()
    ]
    figures = [figure for model in models for figure in model.figures()]
    return {
        "split": measured[0]["split"],
        "questions": {model: len(samples) for model, samples in questions.items()},
        "images": {model.name: int(model.clusters.max()) + 1 for model in models},
        "full": {model.name: model.exact(model.full) for model in models},
        "findings": findings(figures),
        "figures": figures,
    }


def joined(kept: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Put what was found about some rows of the table in place of what was known of them. ValueError for other questions."""
    for name in ("split", "questions", "images", "full"):
        if kept[name] != measured[name]:
            raise ValueError(f"{name} differs from what was measured before: measure all of it")
    rows = {
        tuple(row[key] for key in ("model", "group", "reduce")): row for row in (*kept["figures"], *measured["figures"])
    }
    order = list(measured["full"])
    figures = sorted(rows.values(), key=lambda row: (order.index(row["model"]), row["group"], -row["kept"]))
    return {**measured, "figures": figures, "findings": findings(figures)}


class Answers:
    """All rows of one model. `full` and what `_seeds` returns are `[seeds, questions]` in float64, 1 for right."""

    def __init__(self, measured: Sequence[Row], samples: Sequence[Sample]):
        self.name = measured[0]["model"]
        self.families = {
            name: torch.tensor([sample.family == name for sample in samples])
            for name in sorted({sample.family or "" for sample in samples})
        }
        self.clusters = methods_table.numbered([methods_table.about(sample) for sample in samples])
        self.points: dict[tuple[str, str], list[Row]] = {}
        for row in measured:
            options = {name: value for name, value in row.get("options", {}).items() if name != "seed"}
            self.points.setdefault((row["group"], json.dumps(options)), []).append(row)
        self.full = self._seeds(self.points.pop(("full", "{}")))
        chance = [seed_rows for (group, _), seed_rows in self.points.items() if group == "random"]
        self.random = {_kept(seed_rows[0]): self._seeds(seed_rows) for seed_rows in chance} | {1.0: self.full}

    def exact(self, answers: Tensor) -> dict[str, float]:
        """Compute the share of right answers to all questions and in each family."""
        families = {name: round(float(answers[:, members].mean()), 5) for name, members in self.families.items()}
        return {"all": round(float(answers.mean()), 5)} | families

    def figures(self) -> list[Row]:
        """Make a row for each reducer and share, best share first."""
        rows = []
        for (group, _), seed_rows in self.points.items():
            answers, first = self._seeds(seed_rows), seed_rows[0]
            figure = {"model": self.name, "group": group, "method": first["method"], "reduce": first["reduce"]}
            figure |= {"stage": first["stage"], "keep": first["options"].get("keep"), "seeds": len(seed_rows)}
            figure |= {"kept": round(_kept(first), 4), "cached": round(first["cached"], 4)}
            figure |= {"spread": first["spread"]} if "spread" in first else {}
            figure |= {"exact": self.exact(answers), "by_seed": answers.mean(1).tolist(), "full": self._loss(answers)}
            if group != "random":
                figure["random"] = self._than_random(answers, _kept(first))
                if first["stage"] == "llm":
                    figure["random_cached"] = self._than_random(answers, first["cached"])
            rows.append(figure)
        return sorted(rows, key=lambda row: (row["group"], -row["kept"]))

    def _loss(self, answers: Tensor) -> dict[str, Any]:
        return {name: self._compare(self.full, answers, name) for name in ("all", *self.families)}

    def _compare(self, baseline: Tensor, candidate: Tensor, family: str) -> list[float]:
        """Compute a difference, and the ends of its interval."""
        members = self.families.get(family, torch.ones(len(self.clusters), dtype=torch.bool))
        before, after = (answers.mean(0)[members].tolist() for answers in (baseline, candidate))
        difference = compare(before, after, self.clusters[members].tolist())
        return [round(value, 5) for value in (difference.difference, difference.low, difference.high)]

    def _than_random(self, answers: Tensor, share: float) -> list[float] | None:
        """Compute the difference to `random` at a share, and the ends of its interval; None below its smallest share."""
        below = max((node for node in self.random if node <= share + 1e-6), default=None)
        if below is None:
            return None
        above = min(node for node in self.random if node >= min(share, 1) - 1e-6)
        part = 0.0 if above - below < 1e-6 else (share - below) / (above - below)
        low, high = self.random[below], self.random[above]
        seeds = min({len(low), len(high)} - {1}, default=1)  # the full model has one row
        low, high = (right.expand(seeds, -1) if len(right) == 1 else right[:seeds] for right in (low, high))
        difference = methods_table.difference(answers.mean(0) - ((1 - part) * low + part * high), self.clusters)
        reach = BEYOND * difference["error"]
        return [round(difference["difference"] + way * reach, 5) for way in (0, -1, 1)]

    @staticmethod
    def _seeds(seed_rows: Sequence[Row]) -> Tensor:
        ordered = sorted(seed_rows, key=lambda row: row.get("seed", 0))
        return torch.tensor([[int(letter) for letter in row["exact"]] for row in ordered], dtype=torch.float64)


def _kept(row: Row) -> float:
    return row["after"] / row["before"]


def findings(figures: Sequence[Row]) -> dict[str, Any]:
    """List findings: the cost of half the tokens for methods that look for likeness, in the family that suffers most, and
    the reducers that are no better than random, at the same share of tokens and, within the language model, of the caches."""
    half: dict[str, Any] = {}
    for row in figures:
        if row["method"] in SIMILAR and row["keep"] == HALF:
            worst = min((loss[0], family) for family, loss in row["full"].items() if family != "all")
            within = worst[0] >= -POINT
            half.setdefault(row["model"], {})[row["group"]] = {"worst": worst[1], "loss": worst[0], "within": within}
    lost: dict[str, Any] = {}
    for row in figures:
        for name in ("random", "random_cached"):
            if row.get(name) and row[name][1] <= 0:
                place = lost.setdefault(name, {}).setdefault(row["model"], {}).setdefault(row["group"], [])
                place.append(round(row["kept"], 3))
    return {"half_kept": half, "no_better_than": lost}


def dump(results: Mapping[str, Any]) -> str:
    """Write as JSON, lists of rows with a row a line."""
    parts = []
    for key, value in results.items():
        rows = [json.dumps(row) for row in value] if isinstance(value, list) else []
        text = "[\n  " + ",\n  ".join(rows) + "\n ]" if rows else json.dumps(value)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def render(results: Mapping[str, Any]) -> str:
    """Render the docs' tables: exact match by share, marked (`MARKS`); the cost of half the tokens for each family, in
    points; the reducers that decide the count themselves; prefill time and cache."""
    tables = [_by_share(results), _by_family(results), _own_counts(results)]
    return "\n\n".join([*tables, reducers_speed.render(results["speed"])] if "speed" in results else tables)


def _by_share(results: Mapping[str, Any]) -> str:
    shared = [row for row in results["figures"] if row["keep"] is not None and row["method"] != "litevlm"]
    shares, models = sorted({row["keep"] for row in shared}, reverse=True), list(results["full"])
    cells = {(row["group"], row["model"], row["keep"]): row for row in shared}
    names = [f"{model.removeprefix('demo-')} {100 * share:.0f}%" for model in models for share in shares]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for group in sorted({row["group"] for row in shared}, key=lambda name: (name not in ("random", "uniform"), name)):
        row_cells = [_cell(cells.get((group, model, share))) for model in models for share in shares]
        lines.append(f"| {group} | " + " | ".join(row_cells) + " |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    mark = next((mark for name, mark in MARKS.items() if row.get(name) and row[name][1] <= 0), "")
    return f"{100 * row['exact']['all']:.1f}{mark}"


def _by_family(results: Mapping[str, Any]) -> str:
    half, models = (
        [row for row in results["figures"] if row["keep"] == HALF and row["method"] != "litevlm"],
        list(results["full"]),
    )
    families = [name for name in results["full"][models[0]] if name != "all"]
    lines = ["| 50% kept | " + " | ".join(families) + " |", "|---|" + "---|" * len(families)]
    for group in dict.fromkeys(row["group"] for row in half):
        losses = {row["model"]: row["full"] for row in half if row["group"] == group}
        cells = [
            " / ".join(f"{100 * losses[m][name][0]:+.1f}" if m in losses else "-" for m in models) for name in families
        ]
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _own_counts(results: Mapping[str, Any]) -> str:
    lines = ["| | model | kept | exact | full | less random at that share |", "|---|---|---|---|---|---|"]
    for row in results["figures"]:
        if row["keep"] is None or row["method"] == "litevlm":
            spread = row.get("spread")
            kept = f"{100 * row['kept']:.0f}%" + (
                f" ({100 * spread[1]:.0f} to {100 * spread[3]:.0f})" if spread else ""
            )
            chance = (
                ""
                if row["random"] is None
                else "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * x for x in row["random"]))
            )
            cells = [row["reduce"], row["model"].removeprefix("demo-"), kept, f"{100 * row['exact']['all']:.1f}"]
            lines.append(
                "| " + " | ".join([*cells, f"{100 * results['full'][row['model']]['all']:.1f}", chance]) + " |"
            )
    return "\n".join(lines)
