"""Check that an engine answers like transformers: `vlmcompress doctor OUT --engine vllm` (or `llamacpp --source MODEL`, `mlx`).

Engine and transformers (`engines.hf`, one conversation at a time, with OUT's reducer) answer the same questions greedily:
about one image, two images, an image after text, text only, and for vLLM a second turn and an image far from the beginning.
vLLM gets each question twice in one run with prefix caching, several per batch. Unquantized weights are compared in float32.
GGUF and MLX files are compared with the checkpoint that they were exported from, which transformers reads.

The checks, in the order in which they are run:

names         vLLM's model uses every tensor of OUT and misses none; before any weight is loaded (`vllm.names`)
answers       all questions are answered
prompts       each prompt has as many tokens, after reduction: templates, tokenizer, sizes of images, kept tokens
first tokens  the log-probability of the likeliest first token is the same, in the median and in the maximum
likeliest     it is the same token, unless two are equally likely within the tolerance of the last check
texts         how many answers are the same; required in vLLM in float32 alone, as a near tie changes the rest of an answer
asked again   an answer from cached prefixes and encoder outputs, in another batch, is the same

Cut prompts, preemption, aborted requests, videos, adapters and drafts are tested in `tests/engines`, not here.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from vlmcompress import engines, models
from vlmcompress.engines import Answer, EngineSettings, Request, first_tokens, llamacpp_server
from vlmcompress.engines.vllm import installed, interpreter, names
from vlmcompress.export.convert import convert
from vlmcompress.export.formats.compressed_tensors import FORMAT as COMPRESSED
from vlmcompress.models.data.sources import PROMPTS, load_samples
from vlmcompress.reduction import block as reducer_block
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import Check
from vlmcompress.utils.progress import Progress

KINDS = ("one image", "two images", "image after text", "text only")
SIZES = ((224, 224), (320, 160), (144, 144), (160, 288), (448, 336))
TALL = (64, 8960)  # size that gives over 256 rows of two columns in families with M-RoPE
COLOURS = ("black", "white", "red", "green", "blue", "yellow", "orange", "purple")
AGAIN = " again"  # suffix of the id of a repeated question
TOKENS, LOGPROBS, BATCH = 8, 8, 4


@dataclass(frozen=True)
class Limits:
    """How far log-probabilities of first tokens may differ.

    Attributes:
        median, most: tolerance of the median and of the maximum, in nats.
        share: share of the questions to which `most` applies, as with rounding errors a reducer may keep other tokens of
            an image.
        texts: share of the answers that must have the same text.
    """

    median: float
    most: float
    share: float = 1.0
    texts: float = 0.0


EXACT = {"vllm": Limits(0.001, 0.01, texts=0.75), "llamacpp": Limits(0.02, 0.3), "mlx": Limits(0.02, 0.3)}
"""In float32. llama.cpp rounds inputs of quantized matrices to 8 bits, and towers to 16-bit floats; mlx-vlm scales images by
Pillow, where transformers has torchvision."""
ROUNDED = {False: Limits(0.15, 1.5), True: Limits(0.15, 1.5, share=0.75)}
"""In 16 bits or with quantized weights, by whether tokens are reduced."""


def examine(
    folder: str | Path,
    engine: str,
    *,
    source: str | Path | None = None,
    prompts: int,
    data: Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Check]:
    """Compare the answers of a checkpoint in an engine with those of the same weights in transformers.

    Args:
        engine: "vllm", "llamacpp" or "mlx".
        source: the checkpoint with the same weights that transformers reads, for GGUF and MLX files; None: `folder`.
        prompts: number of questions, of four kinds in turn.
        data: data set with images and questions; None: images are generated.

    Returns:
        The findings; if vLLM cannot load the checkpoint because of its tensors' names, only that one.

    Raises:
        UserError: the folder has no checkpoint for the engine, its reducer block is invalid, there are too few questions, or
            an engine cannot start or answer.
    """
    folder, progress = Path(folder), progress or (lambda *_: None)
    with tempfile.TemporaryDirectory(prefix="vlmcompress-conformance-") as place:
        findings: list[Check] = []
        media = Path(place, "media")
        media.mkdir()
        if engine != "vllm":
            reference = Path(source or folder)
            if engine == "llamacpp" and not llamacpp_server.is_gguf(folder):
                raise UserError(f"{folder} has no model.gguf; write it by export --format gguf")
            if llamacpp_server.is_gguf(reference):
                raise UserError(
                    f"--source {reference} is GGUF, too; give the checkpoint that {folder} was exported from"
                )
            blocks = [
                json_files.read(path / "config.json").get("quantization_config") or {} for path in (reference, folder)
            ]
            if source and bool(blocks[0]) != ("bits" in blocks[1]):
                raise UserError(
                    f"one of {folder} and --source {reference} is quantized; give a checkpoint with the same weights"
                )
            exact, reduced = not blocks[0], False
            requests = make_questions(media, prompts, data, seed)
        else:
            config = models.read_config(folder)
            reduced = reducer_block.read_reducer(config) is not None
            spec = models.spec_for(config)  # errors in the checkpoint are raised before a model is loaded
            interpreter()
            requests = make_questions(media, prompts, data, seed)
            requests += _vllm_questions(media, requests[0], "mrope_section" in json.dumps(config), seed)
            progress("checking tensor names in vLLM", 0, 3)
            findings.append(names.examine_tensors(folder))
            if not findings[0].ok:
                return findings
            method = (config.get("quantization_config") or {}).get("quant_method", COMPRESSED.METHOD)
            reference = folder
            if method != COMPRESSED.METHOD:  # transformers reads that one without further packages
                reference = Path(place, "reference")
                convert(folder, reference, COMPRESSED.METHOD)
            # vLLM's CPU kernel of Gated DeltaNets computes in bfloat16 only (0.32, 0.33: `ops/cpu/gdn_attention.py`).
            exact = not config.get("quantization_config") and not (spec.mixed_blocks and installed().cpu)
        settings: dict[str, Any] = {"max_tokens": TOKENS, "logprobs": LOGPROBS, "dtype": "float32" if exact else "auto"}
        progress("asking transformers", 1, 3)
        alone = EngineSettings(**settings, max_num_seqs=1)
        expected = engines.get_engine("hf").answer(reference, requests, media=media, settings=alone).answers
        progress(f"asking {engine}", 2, 3)
        if engine == "vllm":
            requests = requests + [Request(request.id + AGAIN, request.messages) for request in requests]
            alone = EngineSettings(**settings, max_num_seqs=BATCH)
        answers = engines.get_engine(engine).answer(folder, requests, media=media, settings=alone).answers
    return findings + judge(expected, answers, EXACT[engine] if exact else ROUNDED[reduced])


def judge(expected: Mapping[str, Answer], answers: Mapping[str, Answer], limits: Limits) -> list[Check]:
    """Compare transformers' answers with an engine's; repeated questions (`AGAIN`) are compared with their first answer."""
    expected, answers = _whole_characters(expected), _whole_characters(answers)
    both = [name for name in expected if name in answers]
    failed = [name for name in expected if name not in answers]
    lengths = [name for name in both if answers[name].prompt_tokens != expected[name].prompt_tokens]
    gaps = {name: gap for name in both if (gap := _gap(answers[name], expected[name])) is not None}
    others = []
    for name in gaps:
        first, reference = answers[name].first or {}, expected[name].first or {}
        chosen, token = max(first, key=first.__getitem__), max(reference, key=reference.__getitem__)
        # A near tie may fall either way: each of the two values may be off by the allowed median.
        if reference[token] - reference.get(chosen, -1e9) > 2 * limits.median:
            others.append(name)
    within, enough = sum(gap <= limits.most for gap in gaps.values()), limits.share * len(gaps)
    middle, largest = (statistics.median(gaps.values()), max(gaps.values())) if gaps else (0.0, 0.0)
    texts = sum(answers[name].text == expected[name].text for name in both)
    findings = [
        Check("answers", not failed, f"{len(both)} of {len(expected)} questions answered{_some(failed)}"),
        Check(
            "prompts", not lengths, f"{len(both) - len(lengths)} prompts with equal counts of tokens{_some(lengths)}"
        ),
        Check(
            "first tokens",
            middle <= limits.median and within >= enough,
            f"log-probabilities differ by {middle:.2g} in the median and {largest:.2g} at most, nats "
            f"({limits.median:g} and {limits.most:g} allowed{f', to {limits.share:.0%}' if limits.share < 1 else ''})",
        ),
        Check(
            "likeliest",
            len(gaps) - len(others) >= enough,
            f"{len(gaps) - len(others)} of {len(gaps)} are the same{_some(others)}",
        ),
        Check("texts", texts >= limits.texts * len(both), f"{texts} of {len(both)} answers are the same"),
    ]
    again = [name for name in both if name + AGAIN in answers]
    if again:
        changed = [name for name in again if (_gap(answers[name + AGAIN], answers[name]) or 0.0) > limits.most]
        if limits.texts:
            changed += [name for name in again if answers[name + AGAIN].text != answers[name].text]
        detail = f"{len(again) - len(set(changed))} of {len(again)} answers from caches are the same{_some(changed)}"
        findings.append(Check("asked again", not changed, detail))
    return findings


def _whole_characters(answers: Mapping[str, Answer]) -> dict[str, Answer]:
    """Answers without incomplete characters, which are replacement characters in transformers, and one or none in engines."""
    whole = {}
    for name, answer in answers.items():
        first = first_tokens((text.replace("\ufffd", ""), value) for text, value in (answer.first or {}).items())
        whole[name] = replace(answer, text=answer.text.replace("\ufffd", ""), first=first or None)
    return whole


def _gap(answer: Answer, expected: Answer) -> float | None:
    """Difference of the log-probabilities of the expected likeliest first token, in nats; None if one is not reported."""
    if not answer.first or not expected.first:
        return None
    token = max(expected.first, key=expected.first.__getitem__)
    return abs(answer.first.get(token, min(answer.first.values())) - expected.first[token])


def _some(names: list[str]) -> str:
    return f"; not {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if names else ""


def make_questions(media: Path, count: int, data: Path | None, seed: int) -> list[Request]:
    """Write images to `media` and make `count` questions about them, of the four `KINDS` in turn.

    Args:
        data: data set to take images and questions from (see `load_samples`); None: draw images.

    Raises:
        UserError: fewer questions than kinds, or than samples with images.
    """
    if count < len(KINDS):
        raise UserError(f"--prompts is {count}; take at least {len(KINDS)}, one of each kind")
    chance, pairs = random.Random(seed), list[tuple[dict[str, Any], dict[str, Any]]]()
    if data:
        for most in (2 * count, None):  # some may have no image
            samples = [sample for sample in load_samples(data, samples=most, seed=seed) if sample.images][:count]
            if len(samples) == count:
                break
        else:
            raise UserError(f"{data} has {len(samples)} samples with images; give more, or --prompts {len(samples)}")
        for number, sample in enumerate(samples):
            pairs.append((_image(sample.images[0], media / f"{number}.png"), _text(sample.question)))
    else:
        for number in range(count):
            picture = _image(_drawn(chance, SIZES[number % len(SIZES)]), media / f"{number}.png")
            pairs.append((picture, _text(PROMPTS[number % len(PROMPTS)])))
    requests = []
    for number, (picture, words) in enumerate(pairs):
        kind = KINDS[number % len(KINDS)]
        parts = {
            "one image": [picture, words],
            "two images": [picture, pairs[(number + 1) % count][0], words],
            "image after text": [words, picture],
            "text only": [words],
        }
        requests.append(Request(f"{number} ({kind})", [{"role": "user", "content": parts[kind]}]))
    return requests


def _vllm_questions(media: Path, first: Request, tall: bool, seed: int) -> list[Request]:
    """A second turn after the first question, and an image at positions beyond 256, where bfloat16 cannot represent odd
    ones."""
    turns = [
        *first.messages,
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [_text(PROMPTS[-1])]},
    ]
    picture = _image(_drawn(random.Random(seed), TALL if tall else SIZES[0]), media / "far.png")
    far = [_text(" ".join(map(str, range(300)))), picture, _text(PROMPTS[0])]
    return [Request("second turn", turns), Request("far image", [{"role": "user", "content": far}])]


def _drawn(chance: random.Random, size: tuple[int, int]) -> Image.Image:
    """Draw coloured boxes on coarse noise, so that no two parts are the same."""
    cells = (max(2, size[0] // 16), max(2, size[1] // 16))
    noise = Image.frombytes("RGB", cells, chance.randbytes(3 * cells[0] * cells[1]))
    image = noise.resize(size, Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)
    for colour in chance.sample(COLOURS, 4):
        left, top = chance.randrange(size[0] * 3 // 4), chance.randrange(size[1] * 3 // 4)
        pen.rectangle((left, top, left + size[0] // 4, top + size[1] // 4), fill=colour)
    return image


def _image(image: Image.Image, file: Path) -> dict[str, Any]:
    """The part of a message that shows an image, which is written to a file."""
    image.convert("RGB").save(file, compress_level=1)
    return {"type": "image_url", "image_url": {"url": file.resolve().as_uri()}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
