"""Traffic of a soak: conversations that have one right answer, and an order in which clients ask them, by a seed.

A conversation is a question about one image, about two to four, or none, or a later turn of a longer talk. Images are
shared by many conversations, so that an engine that takes one image's cache entry for another's gives a wrong answer;
others are new to every cache. They come in many sizes, formats and colour modes.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from vlmcompress.evaluation.speed.prompts import stamp
from vlmcompress.models.data.samples import Sample
from vlmcompress.utils.errors import UserError

KINDS = {"one image": 45, "several images": 20, "text": 15, "later turn": 20}
DELIVERIES = {"plain": 35, "streamed": 30, "scored": 20, "two choices": 5, "aborted": 10}
SHAPES = ((1, 1), (0.5, 0.5), (1, 0.5), (0.6, 1.4), (1.5, 1), (2, 2))  # width and height as shares of the original's
FORMATS = (("PNG", "RGB"), ("JPEG", "RGB"), ("WEBP", "RGB"), ("PNG", "L"), ("PNG", "RGBA"), ("PNG", "P"))
MOST_IMAGES = 4
NEW = 0.3  # share of the traffic that asks something new
RECENT = 40  # conversations that half of the repeats choose from


@dataclass(frozen=True)
class Conversation:
    """A conversation that has a right answer. `exactly`: generate `max_tokens` tokens, else until the answer ends."""

    kind: str
    messages: list[dict[str, Any]]
    max_tokens: int
    exactly: bool

    def body(self, model: str) -> dict[str, Any]:
        """The request for greedy tokens, as token ids."""
        return {
            "model": model,
            "messages": self.messages,
            "max_completion_tokens": self.max_tokens,
            "ignore_eos": self.exactly,
            "temperature": 0.0,
            "return_token_ids": True,
        }


@dataclass(frozen=True)
class Ask:
    """A request for an answer: the number of a conversation, and the way in which it is asked.

    Attributes:
        delivery: a key of `DELIVERIES`.
        patience: number of chunks after which the client aborts the request; 0: before anything has arrived.
    """

    number: int
    delivery: str
    patience: int = 0

    def body(self, conversation: Conversation, model: str) -> dict[str, Any]:
        """The body of the conversation's request, with the delivery's settings."""
        body = conversation.body(model)
        if self.delivery in ("streamed", "aborted"):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        elif self.delivery == "scored":
            body |= {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
        elif self.delivery == "two choices":
            body |= {"n": 2, "temperature": 1.0, "top_k": 1}  # vLLM refuses several greedy choices
        return body


def traffic(requests: int, seed: int) -> list[Ask]:
    """Draw the order of requests. Conversations appear first in the order of their numbers, without gaps."""
    draw, asks, count = random.Random(seed), [], 0
    for _ in range(requests):
        if not count or draw.random() < NEW:
            number, count = count, count + 1
        else:
            number = draw.randrange(max(0, count - RECENT) if draw.random() < 0.5 else 0, count)
        (delivery,) = draw.choices(list(DELIVERIES), list(DELIVERIES.values()))
        asks.append(Ask(number, delivery, draw.choice((0, 0, 1, 3)) if delivery == "aborted" else 0))
    return asks


def conversations(samples: Sequence[Sample], count: int, seed: int) -> list[Conversation]:
    """Make `count` conversations from a data set's questions.

    Raises:
        UserError: too few of the questions have one image, or none.
    """
    draw = random.Random(seed)
    with_image = [sample for sample in samples if len(sample.images) == 1 and sample.answer]
    alone = [sample for sample in samples if not sample.images] or [_without_image(sample) for sample in with_image]
    if len(with_image) < 8:
        raise UserError(f"only {len(with_image)} rows have one image and an answer; give --data with 8 or more")
    draw.shuffle(with_image)
    shared = [_part(sample.images[0], draw) for sample in with_image[: max(8, count // 12)]]
    return [_conversation(with_image, alone, shared, serial, draw) for serial in range(count)]


def _without_image(sample: Sample) -> Sample:
    return replace(sample, images=(), messages=None)


def _conversation(
    with_image: Sequence[Sample],
    alone: Sequence[Sample],
    shared: Sequence[dict[str, Any]],
    serial: int,
    draw: random.Random,
) -> Conversation:
    (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
    exactly = draw.random() < 0.2
    max_tokens = draw.choice((12, 24, 40) if exactly else (1, 16, 24))

    def image() -> dict[str, Any]:
        if draw.random() < 0.6:
            return draw.choice(shared)
        return _part(stamp(draw.choice(with_image).images[0], serial), draw)

    def turn(*images: dict[str, Any]) -> dict[str, Any]:
        question = draw.choice(with_image if images else alone).question
        return {"role": "user", "content": [*images, {"type": "text", "text": question}]}

    if kind == "one image":
        messages = [turn(image())]
    elif kind == "several images":
        messages = [turn(*(image() for _ in range(draw.randint(2, MOST_IMAGES))))]
    elif kind == "text":
        messages = [turn()]
    else:
        messages = []
        for _ in range(draw.randint(1, 2)):
            messages += [turn(image()), {"role": "assistant", "content": draw.choice(with_image).answer}]
        messages.append(turn(image()) if draw.random() < 0.3 else turn())
    return Conversation(kind, messages, max_tokens, exactly)


def _part(image: Image.Image, draw: random.Random) -> dict[str, Any]:
    """Make a content part of the image in a random size, format and colour mode."""
    (across, down), (kind, mode) = draw.choice(SHAPES), draw.choice(FORMATS)
    size = (max(28, round(image.width * across)), max(28, round(image.height * down)))
    buffer = io.BytesIO()
    image.convert("RGB").resize(size, Image.Resampling.BICUBIC).convert(mode).save(buffer, kind)
    return part(buffer.getvalue(), kind.lower())


def part(data: bytes, kind: str = "png") -> dict[str, Any]:
    """Make a content part with these bytes as an image."""
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}
