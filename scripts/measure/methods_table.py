"""Turn the rows of `bench_methods.py` into figures with intervals, verdicts and a table.

A difference between two methods is paired: by question (and, where both were calibrated on data, by calibration seed). Its
standard error has two parts, added in squares: that of the mean over questions, with questions about the same images as
clusters, and that of the mean over seeds. `z` is the difference in standard errors; beyond 1.96 it counts as a verdict, and of
forty comparisons of equal methods one will be beyond it on each side. The mean divergence (`path`) is ruled by the few
questions of which the original itself is unsure; `typical` compares its logarithm, question by question. Accuracy against BF16
has the interval of `vlmcompress eval` (`vlmcompress.evaluation.accuracy.compare`), of the score averaged over seeds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from vlmcompress.evaluation.accuracy.compare import compare
from vlmcompress.models.data import Sample

BEYOND = 1.96
COMPARED = ("exact", "path", "typical", "logit")
BITS = ("16", "W8A8", "NVFP4 mixed", "NVFP4", "NVFP4A16", "W4", "W4 channel", "3.25", "3.15", "W3", "W2")
BALANCES = ("ratio", "mbq")
PAIRS = {  # method -> methods that it is compared with, at the same number of bits or at that named
    "rtn": ["rtn 6"],
    "gptq": ["rtn", "stock gptq", "gptq 6"],
    "awq": ["rtn", "stock awq", "awq 6"],
    "mbq": ["awq", "mbq mae"],
    "bits by error 3.15": [("gptq ratio", "W3")],
    "bits by error 3.25": [("gptq ratio", "W3"), "bits by luq", "bits by qvlm"],
}
SMALLEST = 1e-7  # nats, added to divergences before their logarithm
Key = tuple[str, str, str, str]  # model, variant, method, bits


def rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows measured so far; one that was cut off is left out."""
    parsed = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            parsed.append(json.loads(line))
        except ValueError:
            continue
    return parsed


def summarise(work: Path, split: str, questions: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Compute figures of every method, comparisons of those that belong together, and the number of each verdict."""
    facts: dict[Key, list[dict[str, Any]]] = {}
    for row in rows(work / "rows.jsonl"):
        if row["split"] == split and row["model"] in questions:
            facts.setdefault((row["model"], row["variant"], row["method"], row["bits"]), []).append(row)
    measures = {key: _stack(work, seed_rows) for key, seed_rows in facts.items()}
    clusters = {model: [about(sample) for sample in samples] for model, samples in questions.items()}
    figures = [_figures(key, facts[key], measures, questions[key[0]], clusters[key[0]]) for key in facts]
    comparisons = [
        _comparison(first, other, measures, numbered(clusters[first[0]])) for first, other in _pairs(measures)
    ]
    return {
        "split": split,
        "questions": {model: len(samples) for model, samples in questions.items()},
        "samples": next(iter(facts.values()))[0]["samples"],
        "methods": figures,
        "comparisons": comparisons,
        "verdicts": verdicts(figures, comparisons),
    }


def _stack(work: Path, seed_rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack the measures of a method: measure -> `[seeds, questions]`, and the `seeds`."""
    seed_rows = sorted(seed_rows, key=lambda row: row["seed"])
    loaded = [torch.load(work / "measures" / f"{row['key']}.pt") for row in seed_rows]
    stacked: dict[str, Any] = {
        name: torch.stack([measures[name] for measures in loaded]).double() for name in loaded[0]
    }
    stacked["typical"] = (stacked["path"] + SMALLEST).log()
    return stacked | {"seeds": [row["seed"] for row in seed_rows]}


def about(sample: Sample) -> str:
    """A name of a question's images, equal for equal ones; a question without images has a name of its own."""
    if not sample.images:
        return f"text {sample.id}"
    return hashlib.sha256(b"".join(image.tobytes() for image in sample.images)).hexdigest()


def numbered(clusters: Sequence[str]) -> Tensor:
    """Number names from 0 in their order: the clusters of questions about the same images, `[questions]`."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in clusters])


def _figures(
    key: Key,
    seed_rows: Sequence[Mapping[str, Any]],
    measures: Mapping[Key, Any],
    samples: Sequence[Sample],
    clusters: list[str],
) -> dict[str, Any]:
    model, variant, method, bits = key
    measured, images = measures[key], torch.tensor([bool(sample.images) for sample in samples])
    families = [sample.family or "" for sample in samples]
    row: dict[str, Any] = {"model": model, "variant": variant, "method": method, "bits": bits, "seeds": len(seed_rows)}
    for name in ("seconds", "bytes", "bytes_before"):
        if values := [seed_row[name] for seed_row in seed_rows if name in seed_row]:
            row[name] = round(fmean(values), 2)
    for name in ("exact", "nll", "kl", "path", "logit"):
        mean = measured[name].mean(0)
        row[name] = {
            "all": float(mean.mean()),
            "image": float(mean[images].mean()),
            "text": float(mean[~images].mean()),
        }
        row[name]["by_seed"] = measured[name].mean(1).tolist()
    exact = measured["exact"].mean(0)
    row["families"] = {
        name: float(exact[torch.tensor([seed_row == name for seed_row in families])].mean())
        for name in sorted(set(families))
    }
    row["typical"] = float(measured["typical"].mean().exp())
    original = measures.get((model, variant, "bf16", "16"))
    if original is not None and method != "bf16":
        against = compare(original["exact"][0].tolist(), exact.tolist(), clusters)
        row["accuracy"] = against.model_dump(include={"baseline", "candidate", "difference", "low", "high", "verdict"})
    return row


def _pairs(measures: Mapping[Key, Any]) -> Iterator[tuple[Key, Key]]:
    """List the pairs of methods that are compared."""
    for first in measures:
        model, variant, method, bits = first
        base, _, last = method.rpartition(" ")
        others = [base] if base and last in BALANCES else PAIRS.get(method, PAIRS.get(f"{method} {bits}", []))
        for other in others:
            key = (model, variant, other, bits) if isinstance(other, str) else (model, variant, *other)
            if key in measures:
                yield first, key


def _comparison(first: Key, other: Key, measures: Mapping[Key, Any], clusters: Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"model": first[0], "variant": first[1], "method": first[2], "bits": first[3]}
    row |= {"than": other[2]} | ({} if first[3] == other[3] else {"than_bits": other[3]})
    for name in COMPARED:
        a, b = measures[first], measures[other]
        common = [seed for seed in a["seeds"] if seed in b["seeds"]] or [0]
        if b["seeds"] == [0] and len(a["seeds"]) > 1:  # the other method depends on no data
            common, b = a["seeds"], {name: b[name].expand(len(a["seeds"]), -1), "seeds": a["seeds"]}
        pick = [[measured["seeds"].index(seed) for seed in common] for measured in (a, b)]
        row[name] = difference(a[name][pick[0]] - b[name][pick[1]], clusters)
        row[name]["from"] = float(b[name][pick[1]].mean())
    return row


def difference(d: Tensor, clusters: Tensor) -> dict[str, float]:
    """Compute the mean of differences `d [seeds, questions]`, its standard error and ratio; `clusters [questions]` from 0."""
    mean, by_question = float(d.mean()), d.mean(0)
    sums = torch.zeros(int(clusters.max()) + 1, dtype=d.dtype).index_add_(0, clusters, by_question - mean)
    variance = float(sums.square().sum()) / len(by_question) ** 2
    if len(d) > 1:
        variance += float(d.mean(1).var()) / len(d)
    error = variance**0.5
    return {"difference": mean, "error": error, "z": mean / error if error else 0.0}


def points(d: Tensor, clusters: Tensor, digits: int = 1) -> list[float]:
    """The mean of differences `d [seeds, questions]` in percent, and half its interval of 95%; see `difference`."""
    change = difference(d, clusters)
    return [round(100 * change["difference"], digits), round(100 * BEYOND * change["error"], digits)]


def verdicts(figures: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count, by bits, methods with a significant loss to BF16, and balanced ones better or worse than unbalanced ones."""
    counts: dict[str, Any] = {"loses_to_bf16": {}, "compared": {}}
    for row in figures:
        if "accuracy" in row:
            count = counts["loses_to_bf16"].setdefault(f"{row['method']} {row['bits']}", {"yes": 0, "of": 0})
            count["yes"] += row["accuracy"]["high"] < 0
            count["of"] += 1
    for row in comparisons:
        of = "plain" if row["variant"] == "plain" else "planted"
        what = f"{row['method']} {row['bits']} than {row['than']} {row.get('than_bits', '')}, {of}".replace(" ,", ",")
        for name, sign in (("exact", 1), ("path", -1), ("typical", -1), ("logit", -1)):
            count = counts["compared"].setdefault(what, {}).setdefault(name, {"better": 0, "worse": 0, "of": 0})
            z = sign * row[name]["z"]
            count["better"] += z > BEYOND
            count["worse"] += z < -BEYOND
            count["of"] += 1
    return counts


def render(results: Mapping[str, Any]) -> str:
    """Render the docs' table: exact match less that of BF16, in points (* beyond chance), and in brackets the
    divergence per answer token in thousandths of a nat, the mean over questions and the geometric mean."""
    columns = list(dict.fromkeys((row["model"], row["variant"]) for row in results["methods"]))
    order = sorted(results["methods"], key=lambda row: (BITS.index(row["bits"]), row["method"]))
    methods = list(dict.fromkeys((row["bits"], row["method"]) for row in order))
    cells = {(row["model"], row["variant"], row["bits"], row["method"]): row for row in results["methods"]}
    lines = ["| | | " + " | ".join(f"{model.removeprefix('demo-')} {variant}" for model, variant in columns) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for bits, method in methods:
        row_cells = [_cell(cells.get((*column, bits, method))) for column in columns]
        lines.append(f"| {bits} | {method} | " + " | ".join(row_cells) + " |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if "accuracy" not in row:
        return f"{100 * row['exact']['all']:.1f}%"
    against = row["accuracy"]
    mark = "*" if against["high"] < 0 or against["low"] > 0 else ""
    return f"{100 * against['difference']:+.1f}{mark} ({1000 * row['path']['all']:.2g}, {1000 * row['typical']:.2g})"
