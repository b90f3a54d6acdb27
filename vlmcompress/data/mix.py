"""Mix samples with images and samples of text alone, to calibrate a model for both kinds of questions."""

from __future__ import annotations

from pathlib import Path

from vlmcompress.data.samples import Sample
from vlmcompress.data.sources import load_samples
from vlmcompress.errors import UserError


def load_mixed(
    source: str | Path, text: str | Path | None, *, samples: int, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Load `samples` samples of `source`; or, if `text` names a file of samples without images, half from each.

    LUQ (arXiv 2509.23729) mixes as many text tokens as multimodal ones. Here the numbers of samples are equal, so that
    images stay whole.
    """
    if text is None:
        return load_samples(source, samples=samples, seed=seed), []
    if samples < 2:
        raise UserError(f"calibrate.samples is {samples}; with calibrate.text take at least 2")
    found = load_samples(source, samples=samples // 2, seed=seed)
    texts = load_samples(text, samples=samples // 2, seed=seed, text=True)
    count = min(len(found), len(texts))
    return found[:count], texts[:count]
