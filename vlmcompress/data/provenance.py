"""What a model was calibrated on, for the manifest: enough to tell whether two runs saw the same data.

The hash covers what the model sees, decoded pixels and texts in order, and nothing about where they were stored: moving the
folder, or converting PNG to lossless WebP, leaves it as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress.data.encode import ANSWER, TEXT, VISION, chat_template
from vlmcompress.data.samples import Sample


def provenance(
    samples: Sequence[Sample],
    batches: Sequence[dict[str, Tensor]],
    source: str | Path,
    *,
    seed: int | None = None,
    processor: Any = None,
    text: tuple[Sequence[Sample], str | Path] | None = None,
) -> dict[str, Any]:
    """Facts about calibration data, ready for JSON.

    Args:
        samples: what `load_samples` gave.
        batches: what `encode` made of them, and of those of text.
        source: where they came from; only the last part of the path is kept.
        seed: of the choice of samples.
        processor: its chat template's hash is recorded.
        text: samples of text alone that were mixed in, and where they came from; `sha256` is of the others.
    """
    facts: dict[str, Any] = {
        "source": Path(source).name,
        "sha256": data_hash(samples),
        "samples": len(batches),
        "images": sum(len(sample.images) for sample in samples),
        **token_counts(batches),
    }
    if text is not None:
        facts["text"] = {"source": Path(text[1]).name, "sha256": data_hash(text[0]), "samples": len(text[0])}
    if seed is not None:
        facts["seed"] = seed
    if processor is not None:
        facts["chat_template_sha256"] = hashlib.sha256(chat_template(processor).encode()).hexdigest()
    return facts


def token_counts(batches: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """`tokens` by modality, and `visual_share` of them."""
    counts = torch.zeros(4, dtype=torch.long)
    for batch in batches:
        counts += batch["modality"].flatten().long().bincount(minlength=4).cpu()
    tokens = {"text": int(counts[TEXT]), "vision": int(counts[VISION]), "answer": int(counts[ANSWER])}
    total = sum(tokens.values())
    return {"tokens": tokens, "visual_share": round(tokens["vision"] / total, 4) if total else 0.0}


def data_hash(samples: Sequence[Sample]) -> str:
    """SHA-256 of the images' RGB pixels and of the conversations, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        text = json.dumps(sample.conversation(), sort_keys=True).encode()
        digest.update(f"{len(text)}:".encode() + text)
        for image in sample.images:
            digest.update(f"{image.width}x{image.height}:".encode() + image.tobytes())
    return digest.hexdigest()
