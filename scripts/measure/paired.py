"""Statistics that the measuring scripts share: rows on disk, paired differences and their standard errors.

A difference between two settings is paired by question. Its standard error has two parts, added in squares: that of the mean
over questions, with questions about the same images as clusters, and that of the mean over seeds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress.models.data import Sample

BEYOND = 1.96  # standard errors to each side of an interval of 95%


def rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows measured so far; one that was cut off is left out."""
    parsed = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            parsed.append(json.loads(line))
        except ValueError:
            continue
    return parsed


def about(sample: Sample) -> str:
    """A name of a question's images, equal for equal ones; a question without images has a name of its own."""
    if not sample.images:
        return f"text {sample.id}"
    return hashlib.sha256(b"".join(image.tobytes() for image in sample.images)).hexdigest()


def numbered(clusters: Sequence[str]) -> Tensor:
    """Number names from 0 in their order: the clusters of questions about the same images, `[questions]`."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in clusters])


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
