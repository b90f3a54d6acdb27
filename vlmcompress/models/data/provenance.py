"""Facts about calibration data for the manifest: enough to check whether two runs used the same data.

The hash covers what the model sees, decoded pixels and texts in order (for a video the file), and not where they are stored:
moving the folder, or converting PNG to lossless WebP, does not change it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress.models.data.encode import ANSWER, TEXT, VISION, chat_template
from vlmcompress.models.data.samples import Sample
from vlmcompress.models.data.sources import skipped_lines
from vlmcompress.utils import hub, identity

HASH = 16
"""Hexadecimal digits of an image's hash in a manifest."""


def provenance(
    samples: Sequence[Sample],
    encoded: Sequence[dict[str, Tensor]],
    source: str | Path,
    *,
    seed: int | None = None,
    processor: Any = None,
    text: tuple[Sequence[Sample], str | Path] | None = None,
    requested: int | None = None,
    skipped: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Describe calibration data, ready for JSON.

    Args:
        samples: the samples with images, from `load_samples`.
        encoded: all samples from `encode`, including text-only ones.
        source: where the samples came from; the last part of the path is recorded, or an id on the Hub with its commit.
        seed: the seed by which the samples were chosen.
        processor: the processor whose chat template's hash is recorded.
        text: the additional text-only samples and their source; `sha256` does not cover them.
        requested: number of samples in the recipe; recorded if there are fewer.
        skipped: samples that were left out: name -> reason.

    In the result `images` is the number of distinct images (and `videos`, if there are any, that of videos); `prompts` is the
    number of samples whose question is a default prompt, as the data had none.
    """
    sha256, images = _hashed(samples)
    facts: dict[str, Any] = {
        **_source(source),
        "sha256": sha256,
        "samples": len(encoded),
        "images": len(images),
        "image_hashes": sorted(digest.hex()[:HASH] for digest in images),
        **token_counts(encoded),
    }
    if videos := {video.digest() for sample in samples for video in sample.videos}:
        facts["videos"] = len(videos)
    if text is not None:
        facts["text"] = {**_source(text[1]), "sha256": data_hash(text[0]), "samples": len(text[0])}
    if requested is not None and len(encoded) < requested:
        facts["asked"] = requested
    if skipped:
        facts["skipped"] = dict(skipped)
    if prompts := Counter(sample.question for sample in samples if sample.prompted):
        facts["prompts"] = dict(sorted(prompts.items()))
    if seed is not None:
        facts["seed"] = seed
    if processor is not None:
        facts["chat_template_sha256"] = hashlib.sha256(chat_template(processor).encode()).hexdigest()
    return facts


def data_notes(facts: dict[str, Any]) -> list[str]:
    """Notes for the user about data described by `provenance`, one line each."""
    lines = []
    if "asked" in facts:
        lines.append(f"{facts['source']} has {facts['samples']} samples, {facts['asked']} were asked for; all are used")
    lines += no_image_note(facts)
    if prompts := facts.get("prompts"):
        like = f"'{next(iter(prompts))}'"
        many = f"one of {len(prompts)} prompts, like {like}" if len(prompts) > 1 else f"the prompt {like}"
        lines.append(f"{facts['source']} has images without questions; each gets {many}")
    return lines


def skipped_notes(facts: Mapping[str, Any]) -> list[str]:
    """Notes about skipped samples, one line each; only the first ones of many."""
    return skipped_lines(facts.get("skipped", {}))


def no_image_note(facts: Mapping[str, Any]) -> list[str]:
    """A note if the data have no image or video; empty otherwise."""
    if facts["images"] or facts.get("videos"):
        return []
    return [f"no sample of {facts['source']} shows an image, so the model is calibrated on text alone; name images"]


def _source(path: str | Path) -> dict[str, str]:
    return hub.identity(path) or {"source": Path(path).name}


def token_counts(samples: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Count tokens: `tokens` by modality, and `visual_share`, the share of visual ones."""
    counts = torch.zeros(4, dtype=torch.long)
    for sample in samples:
        counts += sample["modality"].flatten().long().bincount(minlength=4).cpu()
    tokens = {"text": int(counts[TEXT]), "vision": int(counts[VISION]), "answer": int(counts[ANSWER])}
    total = sum(tokens.values())
    return {"tokens": tokens, "visual_share": round(tokens["vision"] / total, 4) if total else 0.0}


def data_hash(samples: Sequence[Sample]) -> str:
    """SHA-256 over the images' RGB pixels and the conversations of all samples, in order."""
    return _hashed(samples)[0]


def _hashed(samples: Sequence[Sample]) -> tuple[str, set[bytes]]:
    """`data_hash`, and the hashes of distinct images (of size and pixels)."""
    digest, images = hashlib.sha256(), set[bytes]()
    for sample in samples:
        text = json.dumps(sample.conversation(), sort_keys=True).encode()
        digest.update(f"{len(text)}:".encode() + text)
        for image in sample.images:
            digest.update(identity.image_content(image))
            images.add(identity.image_digest(image))
        for video in sample.videos:
            digest.update(b"video:" + video.digest())
    return digest.hexdigest(), images
