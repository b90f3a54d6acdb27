"""Turn the rows of `bench_reducers.py` into figures with intervals, and the docs' table.

Differences are paired by question, with questions about the same images as a cluster. Those to the model without a reducer have
the interval of `vlmcompress eval` (`accuracy.compare`). Those to `random` take its seeds into account, too: a
seed is one choice of places for all images of a size, so the variance of the mean over seeds adds to that over questions
(`paired.difference`). `random` at a share at which it wasn't asked is interpolated between its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import paired
import torch
from torch import Tensor

from vlmcompress.evaluation.accuracy.compare import compare
from vlmcompress.models.data import Sample
from vlmcompress.utils.registry import REDUCERS

COLOURS = {  # rows of the picture -> colour (Okabe and Ito's)
    "pool": "#d55e00", "uniform": "#e69f00", "random": "#999999", "coverage": "#009e73",
    "divprune": "#56b4e9", "visionzip": "#cc79a7", "dart": "#000000",
}  # fmt: skip
MARKS = {"random": " o", "random_cached": " (o)"}  # no better than random at as many tokens, or as much cache
SHOWN = (0.75, 0.5, 1 / 3, 0.25, 1 / 9)  # shares in the tables
Row = dict[str, Any]


def summarise(measured: Sequence[Row], questions: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Compute figures of every reducer at every share."""
    models = [Answers([row for row in measured if row["model"] == name], questions[name]) for name in questions]
    return {
        "split": measured[0]["split"],
        "questions": {model: len(samples) for model, samples in questions.items()},
        "images": {model.name: int(model.clusters.max()) + 1 for model in models},
        "full": {model.name: round(float(model.full.mean()), 5) for model in models},
        "figures": [figure for model in models for figure in model.figures()],
    }


def joined(kept: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Put new figures in place of earlier ones of the same rows. ValueError where a model was asked other questions."""
    merged: dict[str, Any] = {"split": measured["split"]}
    for name in ("questions", "images", "full"):
        merged[name] = {**kept.get(name, {}), **measured[name]}
        if merged[name] != {**measured[name], **kept.get(name, {})}:
            raise ValueError(f"{name} differs from what was measured before: begin with another --results")
    rows = {(row["model"], row["reduce"]): row for row in (*kept.get("figures", ()), *measured["figures"])}
    order = list(merged["full"])
    figures = sorted(rows.values(), key=lambda row: (order.index(row["model"]), row["group"], -row["kept"]))
    return {**merged, "figures": figures}


class Answers:
    """All rows of a model. `full` and what `_seeds` returns are `[seeds, questions]` in float64, 1 for right."""

    def __init__(self, measured: Sequence[Row], samples: Sequence[Sample]):
        self.name = measured[0]["model"]
        self.clusters = paired.numbered([paired.about(sample) for sample in samples])
        self.points: dict[tuple[str, str], list[Row]] = {}
        for row in measured:
            options = {name: value for name, value in row.get("options", {}).items() if name != "seed"}
            self.points.setdefault((row["group"], json.dumps(options)), []).append(row)
        self.full = self._seeds(self.points.pop(("full", "{}")))
        chance = [seed_rows for (group, _), seed_rows in self.points.items() if group == "random"]
        self.random = {_kept(seed_rows[0]): self._seeds(seed_rows) for seed_rows in chance} | {1.0: self.full}

    def figures(self) -> list[Row]:
        """Make a row for each reducer and share, the largest share first."""
        figures = []
        for (group, _), seed_rows in self.points.items():
            answers, first = self._seeds(seed_rows), seed_rows[0]
            change = compare(self.full.mean(0).tolist(), answers.mean(0).tolist(), self.clusters.tolist())
            figure = {"model": self.name, "group": group, "method": first["method"], "reduce": first["reduce"]}
            figure |= {"keep": first["options"].get("keep"), "seeds": len(seed_rows), "kept": round(_kept(first), 4)}
            figure |= {"cached": round(first["cached"], 4), "exact": round(float(answers.mean()), 5)}
            figure["full"] = [round(value, 5) for value in (change.difference, change.low, change.high)]
            if group != "random":
                figure["random"] = self._than_random(answers, _kept(first))
                if first["stage"] == "llm":
                    figure["random_cached"] = self._than_random(answers, first["cached"])
            figures.append(figure)
        return sorted(figures, key=lambda figure: (figure["group"], -figure["kept"]))

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
        difference = paired.difference(answers.mean(0) - ((1 - part) * low + part * high), self.clusters)
        reach = paired.BEYOND * difference["error"]
        return [round(difference["difference"] + way * reach, 5) for way in (0, -1, 1)]

    @staticmethod
    def _seeds(seed_rows: Sequence[Row]) -> Tensor:
        ordered = sorted(seed_rows, key=lambda row: row.get("seed", 0))
        return torch.tensor([[int(letter) for letter in row["exact"]] for row in ordered], dtype=torch.float64)


def _kept(row: Row) -> float:
    return row["after"] / row["before"]


def dump(results: Mapping[str, Any]) -> str:
    """Write as JSON, figures with one a line."""
    head = json.dumps({**results, "figures": []}).removesuffix("]}")
    return head + "\n" + ",\n".join(map(json.dumps, results["figures"])) + "\n]}\n"


def render(results: Mapping[str, Any]) -> str:
    """Render the docs' tables, one for each two models: points lost at the shares `SHOWN`, with half the interval; marked as
    `MARKS` says. A method that decides itself how many tokens stay is shown at the nearest share, with its own in brackets."""
    models, cells = list(results["full"]), dict[tuple[str, str, float], str]()
    for row in (row for row in results["figures"] if row["method"] in REDUCERS):  # others are gone
        free = row["keep"] is None or row["method"] == "litevlm"
        share = min(SHOWN, key=lambda share: abs(share - row["kept"])) if free else row["keep"]
        note = f" ({row['kept']:.0%})" * (abs(row["kept"] / share - 1) > 0.1)
        cells[row["group"], row["model"], share] = _cell(row) + note
    tables = []
    for columns in (
        [(model, share) for model in models[at : at + 2] for share in SHOWN] for at in range(0, len(models), 2)
    ):
        names = [f"{model.removeprefix('demo-')} {share:.0%}" for model, share in columns]
        lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
        groups = {group for group, model, _ in cells if any(model == column for column, _ in columns)}
        for group in sorted(groups, key=lambda name: (name not in ("random", "uniform"), name)):
            values = [cells.get((group, *column), "") for column in columns]
            lines.append(f"| `{group}` | " + " | ".join(values) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _cell(row: Row) -> str:
    mark = next((mark for name, mark in MARKS.items() if row.get(name) and row[name][1] <= 0), "")
    difference, low, high = (100 * value for value in row["full"])
    return f"{difference:+.1f} ±{(high - low) / 2:.1f}{mark}"


def plot(results: Mapping[str, Any], model: str) -> str:
    """Draw a model's exact match against the share of visual tokens kept, as SVG."""
    full = results["full"][model]
    rows = [row for row in results["figures"] if row["model"] == model and row["group"] in COLOURS]
    low, high = min(row["exact"] for row in rows) - 0.005, max(full, *(row["exact"] for row in rows)) + 0.005

    def place(kept: float, exact: float) -> tuple[float, float]:
        return round(44 + 464 * kept, 2), round(398 - 364 * (exact - low) / (high - low), 2)

    marks = ['<rect width="670" height="440" fill="#fff"/>']
    for percent in range(int(100 * low) + 1, int(100 * high) + 1):
        _, y = place(0, percent / 100)
        marks.append(
            f'<path d="M44 {y}H508" stroke="#ddd"/><text x="38" y="{y + 4}" text-anchor="end">{percent}%</text>'
        )
    for percent in range(0, 101, 20):
        x, _ = place(percent / 100, low)
        marks.append(
            f'<path d="M{x} 34V398" stroke="#ddd"/><text x="{x}" y="414" text-anchor="middle">{percent}%</text>'
        )
    marks.append('<text x="276" y="434" text-anchor="middle">visual tokens kept</text>')
    for number, (group, colour) in enumerate(COLOURS.items()):
        points = [
            (1.0, full, "all tokens"),
            *((r["kept"], r["exact"], r["reduce"]) for r in rows if r["group"] == group),
        ]
        places = [place(kept, exact) for kept, exact, _ in sorted(points, reverse=True)]
        line = " ".join(f"{x},{y}" for x, y in places)
        marks.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for kept, exact, name in points[1:]:
            x, y = place(kept, exact)
            says = f"{name}: {exact:.1%}, {kept:.0%} kept"
            marks.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"><title>{says}</title></circle>')
        y = 34 + 19 * number
        marks.append(
            f'<path d="M528 {y}h26" stroke="{colour}" stroke-width="2"/><text x="560" y="{y + 4}">{group}</text>'
        )
    label = f"Exact match of {model} against the share of visual tokens kept, by reducer"
    head = f'viewBox="0 0 670 440" role="img" aria-label="{label}" font-family="system-ui, sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head} fill="#333"><title>{label}</title>{"".join(marks)}</svg>\n'
