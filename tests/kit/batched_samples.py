"""Samples of several lengths, with and without images, that run in batches."""

from __future__ import annotations

import copy

from tests.kit.pictures import picture
from vlmcompress.models import VLM
from vlmcompress.models.data import Sample


def samples() -> list[Sample]:
    """One image, two, and none, with questions and answers of several lengths."""
    single, two = (picture(60, 80, seed=3),), (picture(60, 80, seed=4), picture(60, 80, seed=5))
    return [
        Sample("a", single, "what is this", "red"),
        Sample("b", (picture(60, 80),), "and what is it?", "a blue one"),
        Sample("c", (), "what is two and two", "four"),
        Sample("d", (), "two and two is", "four or five"),
        Sample("e", two, "which?", "the first"),
        Sample("f", two, "which one?", "no, the second"),
        Sample("g", (picture(80, 60, seed=6),), "what", "x"),
    ]


def wide(vlm: VLM) -> VLM:
    return VLM(copy.deepcopy(vlm.model).float(), vlm.processor, vlm.spec, vlm.path)
