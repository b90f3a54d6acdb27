"""The questions: conversations of every shape, about images of one's own data or drawn here from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from vlmcompress.data.sources import PROMPTS, load_samples
from vlmcompress.errors import UserError

KINDS = ("one image", "two images", "image after text", "text only")
SIZES = ((224, 224), (320, 160), (144, 144), (160, 288), (448, 336))
LARGE = (2048, 2048)
TALL = (64, 8960)  # as M-RoPE's families cut it, over 256 rows of two columns
COLOURS = ("black", "white", "red", "green", "blue", "yellow", "orange", "purple")


@dataclass(frozen=True)
class Question:
    """A conversation in OpenAI's format. Its images are files."""

    id: str
    kind: str
    messages: list[dict[str, Any]]


@dataclass(frozen=True)
class Questions:
    """All questions. Those in `plain` are of the four `KINDS` in turn.

    again: the first question about an image, with other words behind the same image.
    turn: the second turn of that conversation.
    large: a question about the largest image.
    far: a question about an image that stands behind so much text, or is so tall, that positions go beyond 256.
    """

    plain: list[Question]
    again: Question
    turn: Question
    large: Question
    far: Question

    def all(self) -> list[Question]:
        """Every question."""
        return [*self.plain, self.again, self.turn, self.large, self.far]

    def few(self, count: int) -> list[str]:
        """Ids of the first `count` plain questions."""
        return [question.id for question in self.plain[:count]]


def make(media: Path, count: int, data: Path | None, tall: bool, seed: int) -> Questions:
    """Write images to `media` and make questions about them.

    Args:
        count: number of plain questions; at least one of each kind.
        data: data set to take images and questions from (see `load_samples`); None: draw images.
        tall: give the far question a tall image, too.
    """
    if count < len(KINDS):
        raise UserError(f"--prompts is {count}; take at least {len(KINDS)}, one of each kind")
    pairs = _given(media, data, count, seed) if data else _drawn(media, count, seed)
    plain = [_plain(number, pairs) for number in range(count)]
    first, question = pairs[0]
    other = PROMPTS[-1] if question != PROMPTS[-1] else PROMPTS[0]
    turns = [_user(_image(first), _text(question)), {"role": "assistant", "content": "yes"}, _user(_text(other))]
    numbers = " ".join(map(str, range(300)))
    picture = _save(_draw(random.Random(seed), TALL if tall else SIZES[0]), media / "far.png")
    large = _save(_draw(random.Random(seed + 1), LARGE), media / "large.png")
    return Questions(
        plain,
        Question("again", "one image", [_user(_image(first), _text(other))]),
        Question("turn", "second turn", turns),
        Question("large", "one image", [_user(_image(large), _text(question))]),
        Question("far", "image after text", [_user(_text(numbers), _image(picture), _text(question))]),
    )


def _plain(number: int, pairs: list[tuple[Path, str]]) -> Question:
    """Make the question of a number: its kind goes in turn, its image and text come from the pair of that number."""
    kind = KINDS[number % len(KINDS)]
    picture, question = pairs[number]
    words, shown = _text(question), _image(picture)
    parts = {
        "one image": [shown, words],
        "two images": [shown, _image(pairs[(number + 1) % len(pairs)][0]), words],
        "image after text": [words, shown],
        "text only": [words],
    }
    return Question(f"{number} ({kind})", kind, [_user(*parts[kind])])


def _given(media: Path, data: Path, count: int, seed: int) -> list[tuple[Path, str]]:
    """Take an image and a question from each of `count` samples."""
    for most in (2 * count, None):  # some may have no image
        samples = [sample for sample in load_samples(data, samples=most, seed=seed) if sample.images][:count]
        if len(samples) == count:
            break
    else:
        raise UserError(f"{data} has {len(samples)} samples with images; give more, or --prompts {len(samples)}")
    return [
        (_save(sample.images[0], media / f"{number}.png"), sample.question) for number, sample in enumerate(samples)
    ]


def _drawn(media: Path, count: int, seed: int) -> list[tuple[Path, str]]:
    """Draw `count` images, each with a question."""
    chance = random.Random(seed)
    return [
        (_save(_draw(chance, SIZES[number % len(SIZES)]), media / f"{number}.png"), PROMPTS[number % len(PROMPTS)])
        for number in range(count)
    ]


def _draw(chance: random.Random, size: tuple[int, int]) -> Image.Image:
    """Draw coloured boxes on coarse noise, so that no two parts are the same."""
    cells = (max(2, size[0] // 16), max(2, size[1] // 16))
    image = Image.frombytes("RGB", cells, chance.randbytes(3 * cells[0] * cells[1])).resize(
        size, Image.Resampling.NEAREST
    )
    pen = ImageDraw.Draw(image)
    for colour in chance.sample(COLOURS, 4):
        left, top = chance.randrange(size[0] * 3 // 4), chance.randrange(size[1] * 3 // 4)
        pen.rectangle((left, top, left + size[0] // 4, top + size[1] // 4), fill=colour)
    return image


def _save(image: Image.Image, file: Path) -> Path:
    image.convert("RGB").save(file, compress_level=1)
    return file.resolve()


def _user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(file: Path) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": file.as_uri()}}
