"""Compare answers about large images in an engine with transformers', and say whether engine or weights change them.

Wrong boxes and clicks are blamed on quantization where it is the engine that computes positions in another way (threads:
docs/troubleshooting.md, "Engine or weights?"). With the same weights in both, what differs is the engine's; of the original's
answers in transformers, what differs in the quantized model's is the weights'.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from vlmcompress.engines import Answer, Request, first_tokens, media_file
from vlmcompress.evaluation.accuracy.grounding import region
from vlmcompress.evaluation.doctor.questions import SCALED
from vlmcompress.utils import json_files
from vlmcompress.utils.messages import Check

Answers = Mapping[str, Answer]
FAR = 0.02  # of the image's side


def whole_characters(answers: Answers) -> dict[str, Answer]:
    """Answers without incomplete characters, which are replacement characters in transformers, and one or none in engines."""

    def whole(text: str) -> str:
        return text.replace("\ufffd", "")

    return {name: replace(_first_as(answer, whole), text=whole(answer.text)) for name, answer in answers.items()}


def without_special_tokens(answers: Answers, folder: Path) -> dict[str, Answer]:
    """Answers whose first tokens are not shown where they are special ones of a checkpoint, as in OpenVINO's texts."""
    file = folder / "tokenizer.json"
    added = json_files.read(file).get("added_tokens") or () if file.is_file() else ()
    special = {token["content"] for token in added if token.get("special")}
    return {name: _first_as(answer, lambda text: "" if text in special else text) for name, answer in answers.items()}


def _first_as(answer: Answer, plain: Callable[[str], str]) -> Answer:
    """An answer whose first tokens have the texts that `plain` makes of theirs; equal texts become one."""
    first = first_tokens((plain(text), value) for text, value in (answer.first or {}).items())
    return replace(answer, first=first or None)


def nats(answer: Answer, expected: Answer) -> float | None:
    """Difference of the log-probabilities of the expected likeliest first token, in nats; None if one is not reported."""
    if not answer.first or not expected.first:
        return None
    token = max(expected.first, key=expected.first.__getitem__)
    return abs(answer.first.get(token, min(answer.first.values())) - expected.first[token])


@dataclass(frozen=True)
class Offset:
    """How far the box or point in an answer is at most from that in another: in pixels, and as a share of the image's side."""

    pixels: float
    share: float


def offset(answer: str, expected: str, size: tuple[int, int]) -> Offset | None:
    """Compare the boxes or points in two answers about an image of `(width, height)`; None where neither has one."""
    places = region(answer), region(expected)
    if places == (None, None):
        return None
    if len(places[0] or ()) != len(places[1] or ()):
        return Offset(float("inf"), float("inf"))
    shares = [abs(a - b) for a, b in zip(*filter(None, places), strict=True)]
    return Offset(max(share * size[at % 2] for at, share in enumerate(shares)), max(shares))


def offsets(requests: Sequence[Request], expected: Answers, answers: Answers, media: Path) -> dict[str, Offset]:
    """`offset` of the questions about one image whose answers have boxes or points, by their ids."""
    result = {}
    for request in requests:
        name = request.id
        if request.images() != 1 or name not in expected or name not in answers:
            continue
        with Image.open(media_file(request.media()[0]["image_url"]["url"], media)) as image:
            size = image.size
        if (off := offset(answers[name].text, expected[name].text, size)) is not None:
            result[name] = off
    return result


def judge_sizes(expected: Answers, answers: Answers, most: float, engine: str) -> Check:
    """Compare answers about large images, whose ids are their sizes.

    Args:
        most: how far log-probabilities of first tokens may differ, in nats.
        engine: its name in the message.
    """
    parts, wrong, scaling = [], False, False
    for name in (name for name in expected if not name.endswith(SCALED)):
        reference, got, before = expected[name], answers.get(name), name + SCALED
        if reference.refused:
            parts.append(f"{name} not compared, transformers refuses it")
            continue
        if got is None or got.refused:
            parts.append(f"{name} refused")
            wrong = True
            continue
        if got.prompt_tokens != reference.prompt_tokens:
            parts.append(f"{name} {got.prompt_tokens:,} tokens instead of {reference.prompt_tokens:,}")
            wrong = True
            continue
        off = nats(got, reference)
        parts.append(f"{name} {'no first token reported' if off is None else f'{off:.2g} nats'}")
        if off is None:
            continue
        wrong |= off > most
        if before in answers and not answers[before].refused and not expected[before].refused:
            same = nats(answers[before], expected[before])
            parts[-1] += "" if same is None else f" ({same:.2g} if scaled before)"
            scaling |= same is not None and off > most >= 4 * same
    if scaling:
        parts.append(f"{engine} scales or pads images in another way")
    return Check("real sizes", not wrong, f"{'; '.join(parts)} ({most:g} allowed)")


def judge_boxes(off: Mapping[str, Offset]) -> Check:
    """Report how far boxes and points are off. In the median they must be less than `FAR` off: of single coordinates near
    ties fall either way."""
    pixels = sorted(each.pixels for each in off.values())
    middle = statistics.median_high(each.share for each in off.values())
    detail = f"{len(off)} are {statistics.median_high(pixels):.3g} pixels off in the median, {pixels[-1]:.3g} at most"
    return Check("boxes", middle < FAR, f"{detail} ({FAR:.0%} of the side allowed in the median)")


def verdict(
    same: tuple[Answers, Answers, Mapping[str, Offset]],
    other: tuple[Answers, Answers, Mapping[str, Offset]] | None,
    most: float,
    engine: str,
    quantized: bool,
) -> Check:
    """Say in one line whether the engine or the weights change answers about large images more.

    Args:
        same: of the same weights transformers' answers, the engine's, and how far boxes are off between them.
        other: of the original and of these weights transformers' answers, and the same; None: the original was not asked.
        most: nats up to which nothing differs.
        quantized: whether the weights are.
    """
    parts = [
        (_largest(part[0], part[1]), max((each.pixels for each in part[2].values()), default=None))
        for part in (same, other)
        if part
    ]
    texts = [f"{size:.2g} nats" + ("" if off is None else f", boxes by {off:.3g} pixels") for size, off in parts]
    words = "with the same weights" if quantized else "already with unquantized weights"
    line = f"{engine} differs from transformers {words} by {texts[0]}"
    if other:
        line += f"; these weights differ from the original's by {texts[1]}"
    values = [max(size, 0.0) for size, _ in parts]
    boxes = [off or 0.0 for _, off in parts]
    if max(values) <= most and not any(boxes):
        culprit = "neither" if other else "not the engine"
    elif other:
        culprit = ("the engine", "the weights")[boxes[1] > boxes[0] if boxes[0] != boxes[1] else values[1] > values[0]]
    else:
        culprit = "the engine"
    return Check("engine or weights", True, f"{culprit}: {line}")


def _largest(expected: Answers, answers: Answers) -> float:
    """The largest difference in nats; that of another number of tokens is infinite."""
    gaps = [0.0]
    for name, reference in expected.items():
        got = answers.get(name)
        if got is None or got.refused or reference.refused or name.endswith(SCALED):
            continue
        gaps.append(float("inf") if got.prompt_tokens != reference.prompt_tokens else nats(got, reference) or 0.0)
    return max(gaps)
