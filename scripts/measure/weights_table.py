"""Turn the rows of `compare_weights.py` into figures with intervals, ratios to the better stock method, and a table.

A divergence is a mean over tokens, so it is a ratio of sums over texts (or questions). The ratio of two methods' divergences
r = sum a / sum b is measured on the same texts: its variance is that of the residuals `a - r b`, added up over clusters (texts,
or images with all their questions), over the squared sum of b; where there are several calibration seeds, that of the
seeds' own ratios over their number is added. Intervals are of 95%: 1.96 standard errors to each side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from paired import BEYOND, about, difference, numbered, rows
from torch import Tensor
from weight_methods import FORMATS, METHODS, STOCK

from vlmcompress.models.data import Sample

Measures = Mapping[str, Tensor]
Key = tuple[str, str]  # format, method


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
    r = float(a.sum() / b.sum())
    residual = (a - r * b).mean(0)
    sums = torch.zeros(int(clusters.max()) + 1, dtype=a.dtype).index_add_(0, clusters, residual)
    variance = float(sums.square().sum() / b.mean(0).sum() ** 2)
    if len(a) > 1:
        variance += float((a.sum(1) / b.sum(1)).var()) / len(a)
    return {"ratio": r, "low": r - BEYOND * variance**0.5, "high": r + BEYOND * variance**0.5}


def summarise(work: Path, model: str, split: str, questions: Sequence[Sample]) -> list[dict[str, Any]]:
    """Compute a row for each format and method: means over seeds, and ratios of divergences to the better stock method."""
    grouped: dict[Key, list[dict[str, Any]]] = {}
    for row in rows(work / "rows.jsonl"):
        if row["model"] == model and row["split"] == split:
            grouped.setdefault((row["format"], row["method"]), []).append(row)
    loaded = {key: _stack(work, seed_rows) for key, seed_rows in grouped.items()}
    clusters = {"answers": numbered([about(sample) for sample in questions])} if questions else {}
    keys = sorted(grouped, key=lambda key: order((model, split, *key)))
    return [{"model": model, "split": split} | _figures(key, grouped[key], loaded, clusters) for key in keys]


def order(name: tuple[str, str, str, str]) -> tuple[str, bool, int, int]:
    """Where a row of this model, split, format and method stands in the table: as they are listed in `weight_methods.py`."""
    model, split, form, method = name
    return model, split == "test", list(FORMATS).index(form), list(METHODS).index(method)


def _stack(work: Path, seed_rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Tensor]]:
    return {row["seed"]: torch.load(work / "measures" / f"{row['key']}.pt") for row in seed_rows}


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
        against = METHODS[method].than or _better_stock(form, f"{what}/{name}", loaded)
        if against in loaded and all(f"{what}/{name}" in measures for measures in loaded[key].values()):
            a, b = _paired(loaded, (key, against), f"{what}/{name}")
            own_clusters = clusters.get(what, torch.arange(a.shape[1]))
            row[f"{what}_ratio"] = ratio(a, b, own_clusters) | {"to": " ".join(against)}
            if what == "answers":
                exact, other = _paired(loaded, (key, against), "answers/exact")
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


def _paired(loaded: Mapping[Key, Mapping[int, Measures]], pair: Sequence[Key], name: str) -> list[Tensor]:
    """Measures `[seeds, texts]` of two methods for the seeds that both have; one without data is the same for every seed."""
    fixed = [METHODS[method].data_free for _, method in pair]
    seeds = [loaded[key].keys() for key, same in zip(pair, fixed, strict=True) if not same] or [{0}]
    common = sorted(set.intersection(*map(set, seeds)))
    return [
        torch.stack([loaded[key][0 if same else seed][name] for seed in common]).double()
        for key, same in zip(pair, fixed, strict=True)
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
    return format(row[name], form) if name in row else ""


def _ratio(row: Mapping[str, Any], name: str) -> str:
    return "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**row[name]) if name in row else ""
