"""Turn the rows of `compare_weights.py` into figures with intervals, ratios to the better stock method, and a table.

A divergence is a mean over tokens, so it is a ratio of sums over texts (or questions). The ratio of two methods' divergences
r = sum a / sum b is measured on the same texts; its logarithm gets the interval, so that no limit is below zero. The variance
of log r has two parts: that of the residuals `a / sum a - b / sum b`, added up over clusters (texts, or images with all their
questions), and, where there are several calibrations, that of their own log ratios over their number. Intervals are of 95%: as
many standard errors to each side as Student's t says, with the degrees of freedom of the sum by Satterthwaite (Biometrics
Bulletin 2, 1946), as three calibrations tell little of their variance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from paired import about, difference, numbered, rows
from scipy import stats
from torch import Tensor
from weight_methods import FORMATS, METHODS, STOCK

from vlmcompress.models.data import Sample

Measures = Mapping[str, Tensor]
Key = tuple[str, str]  # format, method
SHOWN = ("text/nll", "text/tokens", "text/kl", "answers/path", "answers/exact")  # measures that the table is made of


def means(measures: Measures) -> dict[str, float]:
    """The means that a row shows: `perplexity`, `text_kl` a token, `answers_kl` an answer token, `exact`."""
    output = {}
    if "text/nll" in measures:
        tokens = float(measures["text/tokens"].sum())
        output["perplexity"] = exp(float(measures["text/nll"].sum()) / tokens)
        output["text_kl"] = float(measures["text/kl"].sum()) / tokens
    if "answers/path" in measures:
        output |= {
            "answers_kl": float(measures["answers/path"].mean()),
            "exact": float(measures["answers/exact"].mean()),
        }
    return output


def ratio(a: Tensor, b: Tensor, clusters: Tensor) -> dict[str, float]:
    """Compute the ratio of the sums of `a` and `b`, both `[seeds, texts]`, with `low` and `high`; `clusters [texts]` from 0."""
    residual = (a / a.sum() - b / b.sum()).sum(0)
    sums = torch.zeros(int(clusters.max()) + 1, dtype=a.dtype).index_add_(0, clusters, residual)
    parts = [(float(sums.square().sum()), len(sums) - 1)]  # variances with their degrees of freedom
    if len(a) > 1:
        parts.append((float((a.sum(1) / b.sum(1)).log().var()) / len(a), len(a) - 1))
    variance = sum(part for part, _ in parts)
    half = 0.0
    if variance:
        freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
        half = float(stats.t.ppf(0.975, freedom)) * variance**0.5
    r = float(a.sum() / b.sum())
    return {"ratio": r, "low": r * exp(-half), "high": r * exp(half)}


def summarise(work: Path, model: str, split: str, questions: Sequence[Sample]) -> list[dict[str, Any]]:
    """Compute a row for each format and method: means over seeds, and ratios of divergences to the better stock method."""
    grouped: dict[Key, list[dict[str, Any]]] = {}
    for row in rows(work / "rows.jsonl"):
        if row["model"] == model and row["split"] == split:
            grouped.setdefault((row["format"], row["method"]), []).append(row)
    loaded = {key: {row["seed"]: _measures(work, row) for row in seed_rows} for key, seed_rows in grouped.items()}
    clusters = {"answers": numbered([about(sample) for sample in questions])} if questions else {}
    keys = sorted(grouped, key=lambda key: order((model, split, *key)))
    return [{"model": model, "split": split} | _figures(key, grouped[key], loaded, clusters) for key in keys]


def raw(work: Path, model: str, split: str, questions: Sequence[Sample]) -> dict[str, np.ndarray]:
    """What the rows of a model and split were computed from: `model|split|format|method|seed|measure` -> a value a text or
    question; the measure `image` numbers the questions' images."""
    images = {"image": numbered([about(sample) for sample in questions]).numpy().astype(np.int16)} if questions else {}
    arrays = {}
    for row in rows(work / "rows.jsonl"):
        if row["model"] == model and row["split"] == split:
            measures = _measures(work, row)
            values = images | {name: measures[name].float().numpy() for name in SHOWN if name in measures}
            key = f"{model}|{split}|{row['format']}|{row['method']}|{row['seed']}"
            arrays |= {f"{key}|{name}": array for name, array in values.items()}
    return arrays


def order(name: tuple[str, str, str, str]) -> tuple[str, bool, int, int]:
    """Where a row of this model, split, format and method stands in the table: as they are listed in `weight_methods.py`."""
    model, split, form, method = name
    return model, split == "test", list(FORMATS).index(form), list(METHODS).index(method)


def _measures(work: Path, row: Mapping[str, Any]) -> dict[str, Tensor]:
    measures: dict[str, Tensor] = torch.load(work / "measures" / f"{row['key']}.pt", weights_only=True)
    return measures


def _figures(
    key: Key,
    seed_rows: Sequence[Mapping[str, Any]],
    loaded: Mapping[Key, Mapping[int, Measures]],
    clusters: Mapping[str, Tensor],
) -> dict[str, Any]:
    form, method = key
    row: dict[str, Any] = {"format": form, "method": method, "seeds": len(seed_rows)}
    for name in ("perplexity", "text_kl", "answers_kl", "exact", "seconds", "statistics_seconds", "bytes"):
        if values := [seed_row[name] for seed_row in seed_rows if name in seed_row]:
            row[name] = fmean(values)
    for what, name in (("text", "kl"), ("answers", "path")):
        against = _better_stock(form, f"{what}/{name}", loaded)
        if against in loaded and all(f"{what}/{name}" in measures for measures in loaded[key].values()):
            seeds = _common_seeds(loaded, (key, against))
            a, b = _paired(loaded, (key, against), f"{what}/{name}", seeds)
            own_clusters = clusters.get(what, torch.arange(a.shape[1]))
            row[f"{what}_ratio"] = ratio(a, b, own_clusters) | {"to": "|".join(against), "seeds": seeds}
            if what == "answers":
                exact, other = _paired(loaded, (key, against), "answers/exact", seeds)
                row["exact_difference"] = difference(exact - other, own_clusters)
    return row


def _better_stock(form: str, name: str, loaded: Mapping[Key, Mapping[int, Measures]]) -> Key | None:
    """The stock method of least mean divergence in a format."""
    means = {
        key: fmean(float(measures[name].mean()) for measures in by_seed.values() if name in measures)
        for key, by_seed in loaded.items()
        if key[1] in STOCK and key[0] == form and any(name in measures for measures in by_seed.values())
    }
    return min(means, key=means.__getitem__) if means else None


def _common_seeds(loaded: Mapping[Key, Mapping[int, Measures]], pair: Sequence[Key]) -> list[int]:
    """The calibrations that both methods have; one without data is the same for every seed."""
    seeds = [set(loaded[key]) for key in pair if not METHODS[key[1]].data_free] or [{0}]
    return sorted(set.intersection(*seeds))


def _paired(
    loaded: Mapping[Key, Mapping[int, Measures]], pair: Sequence[Key], name: str, seeds: Sequence[int]
) -> list[Tensor]:
    """Measures `[seeds, texts]` of two methods."""
    return [
        torch.stack([loaded[key][0 if METHODS[key[1]].data_free else seed][name] for seed in seeds]).double()
        for key in pair
    ]


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render the table: a line for each model, format and method; divergences on texts and on answers about images, each with
    its ratio to that of llm-compressor's better method, and with the same ratio on the test split."""
    lines = [
        "| model | format | method | seeds | perplexity | KL text | to stock | test split | KL answers | to stock | test split "
        "| exact | seconds |"
    ]
    lines.append("|" + "---|" * 3 + "---:|" * 10)
    tests = {(row["model"], row["format"], row["method"]): row for row in rows if row["split"] == "test"}
    for row in (row for row in rows if row["split"] != "test"):
        test = tests.get((row["model"], row["format"], row["method"]), {})
        cells = [row["model"], row["format"], row["method"], str(row["seeds"]), _number(row, "perplexity", ".1f")]
        cells += [_number(row, "text_kl", ".3f"), _ratio(row, "text_ratio"), _ratio(test, "text_ratio")]
        cells += [_number(row, "answers_kl", ".3g"), _ratio(row, "answers_ratio"), _ratio(test, "answers_ratio")]
        cells.append(_number(row, "exact", ".1%"))
        cells.append(" + ".join(f"{row[name]:.0f}" for name in ("seconds", "statistics_seconds") if name in row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(row: Mapping[str, Any], name: str, form: str) -> str:
    if name not in row:
        return ""
    return f"{float(format(row[name], '.3g')):,.0f}" if row[name] >= 1000 else format(row[name], form)


def _ratio(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return ""
    itself = row[name]["ratio"] == row[name]["low"] == row[name]["high"] == 1
    return "1" if itself else "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**row[name])
