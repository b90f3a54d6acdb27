"""What the conformance check asks: conversations of every shape, about images of one's own data or drawn here from a seed, and
the plan: engines, their settings, and the rounds of questions for each."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from vlmcompress.models.data.sources import PROMPTS, load_samples
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.utils.errors import UserError

KINDS = ("one image", "two images", "image after text", "text only")
SIZES = ((224, 224), (320, 160), (144, 144), (160, 288), (448, 336))
LARGE = (2048, 2048)
TALL = (64, 8960)  # as M-RoPE's families cut it, over 256 rows of two columns
COLOURS = ("black", "white", "red", "green", "blue", "yellow", "orange", "purple")

TOKENS = 8
FEW = 8
JSON_TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "sure": {"type": "boolean"},
        "count": {"enum": [1, 2, 3]},
    },
    "required": ["colour", "sure", "count"],
    "additionalProperties": False,
}
ALL_TOKENS = {"max_tokens": TOKENS, "ignore_eos": True}
SAMPLES, SAMPLED = 3, ALL_TOKENS | {"temperature": 1.0, "seed": 11}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

Round = dict[str, Any]


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


def make_questions(media: Path, count: int, data: Path | None, tall: bool, seed: int) -> Questions:
    """Write images to `media` and make questions about them.

    Args:
        count: number of plain questions; at least one of each kind.
        data: data set to take images and questions from (see `load_samples`); None: draw images.
        tall: give the far question a tall image, too.
    """
    if count < len(KINDS):
        raise UserError(f"--prompts is {count}; take at least {len(KINDS)}, one of each kind")
    pairs = _from_data(media, data, count, seed) if data else _drawn(media, count, seed)
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


def _from_data(media: Path, data: Path, count: int, seed: int) -> list[tuple[Path, str]]:
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


def unreduced_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the config.json of a checkpoint without its reducer."""
    names = [name.removeprefix(reducer_block.PREFIX) for name in config["architectures"]]
    return {key: value for key, value in config.items() if key != reducer_block.KEY} | {"architectures": names}


def plan_engines(
    view: Path, config: Mapping[str, Any], questions: Questions, exact: str, cut: int
) -> list[dict[str, Any]]:
    """All engines, in the order in which they run.

    Args:
        view: folder with the checkpoint's files; the engines write their config.json there, so all know it by one path.
        config: config.json of the checkpoint.
        exact: type in which answers must be equal: "float32", or "auto" where weights have no such form. vLLM takes "auto"
            for "float32", too, where it can't compute a model in float32.
        cut: number of tokens of a step, so small that every image is cut.
    """
    carried = reducer_block.read(config)
    ids, few = [question.id for question in questions.plain], questions.few(FEW)
    off: dict[str, Any] = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0, "max_num_seqs": FEW}

    def engine(name: str, rounds: list[Round], of: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        limits = {"image": 2, "video": 0, "audio": 0}
        common = {"dtype": exact, "max_model_len": -1, "limit_mm_per_prompt": limits, "seed": 0}
        return {
            "name": name,
            "model": str(view),
            "config": dict(of or config),
            "options": common | options,
            "rounds": rounds,
        }

    all_engines = [
        engine("plain", _plain_rounds(ids, few), **off),
        engine("caches", _cached_rounds(few), enable_prefix_caching=True, max_num_seqs=FEW),
        engine("chunks", _chunked_rounds(few), **off | {"max_num_seqs": min(4, cut), "max_num_batched_tokens": cut}),
        engine("served", _served_rounds(ids, few), dtype="auto", enable_prefix_caching=True, max_num_seqs=FEW),
    ]
    if carried is not None:
        other = reducer_block.write(config, another(carried.reducer))
        bare = unreduced_config(config)
        all_engines += [
            engine("unreduced", [_round("agree", ids)], bare, dtype="auto", max_num_seqs=FEW),
            engine("other", [_round("one", few[:1])], other, dtype="auto", max_num_seqs=FEW),
        ]
    # The last one: it imports numba, and vLLM 0.32, which looks into all modules, starts no engine behind that.
    all_engines.append(engine("ngram", [_round("few", few)], **off, speculative_config=NGRAM))
    return all_engines


def another(reducer: ReducerChoice) -> ReducerChoice:
    """A reducer that keeps as many tokens as `reducer` could, chosen otherwise: only its name tells them apart."""
    from vlmcompress.reduction import choice as chosen

    other = "uniform" if reducer.method != "uniform" else "random"
    keep = 0.5 if reducer.options.keep is None else reducer.options.keep
    return chosen.choose(other, {"keep": keep}, "another")


def _round(name: str, ask: list[str], **settings: Any) -> Round:
    """Make a round for `conformance_worker`: the requests `ask`, greedily unless `settings` say otherwise."""
    return {"name": name, "ask": ask, "sampling": ALL_TOKENS, **settings}


def _plain_rounds(ids: list[str], few: list[str]) -> list[Round]:
    """Rounds without caches and cut prompts: one request after the other, then all mixed."""
    return [
        _round("alone", ids, alone=True),
        _round("mixed", ids),
        _round("turn", ["again", "turn"], alone=True),
        _round("large", ["large"]),
        _round("sampled", few[:3], sampling=SAMPLED | {"n": SAMPLES}),
        *(_round(f"sample {n}", few[:3], sampling=SAMPLED | {"seed": SAMPLED["seed"] + n}) for n in range(SAMPLES)),
    ]


def _cached_rounds(few: list[str]) -> list[Round]:
    """Rounds with prefixes and encoder outputs from caches."""
    return [
        _round("cold", few, alone=True),
        _round("again", few, alone=True),
        _round("together", few),
        _round("long", ["far"], alone=True),  # a prefix is kept in blocks, of hundreds of tokens with recurrent states
        _round("long again", ["far"], alone=True),
        _round("warm", few, alone=True, reset=["prefix"]),
        _round("repeat", ["again", "turn"], alone=True),
    ]


def _chunked_rounds(few: list[str]) -> list[Round]:
    """Rounds with prompts in pieces that end within images; the third step is in the middle of an image."""
    return [
        _round("cut", few),
        _round("abort", few, steps=3, abort=few[:2]),
        _round("after", few),
        _round("large", ["large"]),
    ]


def _served_rounds(ids: list[str], few: list[str]) -> list[Round]:
    """Rounds with the settings of `vllm serve`, in the checkpoint's own type."""
    forced = {"max_tokens": JSON_TOKENS, "json": SCHEMA}
    return [
        _round("agree", ids),
        _round("far", ["far"], alone=True),
        _round("json", few, sampling=forced),
        _round("stream", few[:1], stream=True, alone=True, sampling=forced),
        _round("whole", few[:1], alone=True, sampling=forced),
        _round("abort", few, steps=2, abort=few[:2]),
        _round("after", few),
    ]
