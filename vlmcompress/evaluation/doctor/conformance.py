"""Check that an engine answers like transformers: `vlmcompress doctor OUT --engine vllm` (or `llamacpp --source MODEL`, ...).

Engine and transformers (`engines.hf`, one conversation at a time, with OUT's reducer) answer the same questions greedily:
about one image, two images, an image after text, text only, and for vLLM a second turn and an image far from the beginning.
vLLM gets each question twice in one run with prefix caching, several per batch. Unquantized weights are compared in float32.
Files for other engines are compared with the checkpoint that they were exported from, which transformers reads.

Those images are small: limits of pixels, tiles and padding do not show, and boxes are few pixels off. So one image of 1920 x
1080 is asked about by default: beyond the 48 x 48 positions of Qwen's tables on both sides, not square, and, with some 2,000
tokens, about as much work as all the other questions. `questions.REAL` has the sizes of `--sizes all`, of which one has four
times as many. The question is for a box, as a wrong table of positions moves boxes and leaves first tokens as they are.
Engines that scale images themselves get each a second time, as transformers' processor scales it: what then still differs is
no matter of pixels.

The checks, in the order in which they are run:

names         vLLM's model uses every tensor of OUT and misses none; before any weight is loaded (`vllm.names`)
known         what the engine computes otherwise than transformers, if anything: then more may differ in float32 (`KNOWN`)
answers       all questions are answered
prompts       each prompt has as many tokens, after reduction: templates, tokenizer, sizes of images, kept tokens
first tokens  the log-probability of the likeliest first token is the same, in the median and in the maximum
likeliest     it is the same token, unless two are equally likely within the tolerance of the last check
texts         how many answers are the same; required in vLLM in float32 alone, as a near tie changes the rest of an answer
real sizes    as prompts and first tokens, for each large image
boxes         how many pixels the boxes and points in answers are off, where the data ask for some
asked again   an answer from cached prefixes and encoder outputs, in another batch, is the same
engine or weights   which of them changes answers about large images more; the weights' part needs the original (`--baseline`)

Cut prompts, preemption, aborted requests, videos, adapters and drafts are tested in `tests/engines`, not here.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vlmcompress import engines, models
from vlmcompress.engines import Answer, EngineSettings, Request, llamacpp_server
from vlmcompress.engines.vllm import installed, interpreter, names
from vlmcompress.evaluation.doctor.questions import DEFAULT, make_questions, sized_questions, vllm_questions
from vlmcompress.evaluation.doctor.real_sizes import (
    judge_boxes,
    judge_sizes,
    nats,
    offsets,
    verdict,
    whole_characters,
    without_special_tokens,
)
from vlmcompress.export.convert import convert
from vlmcompress.export.formats.compressed_tensors import FORMAT as COMPRESSED
from vlmcompress.reduction import block as reducer_block
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import Check
from vlmcompress.utils.progress import Progress

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


EXACT = {"vllm": Limits(0.001, 0.01, texts=0.75), **dict.fromkeys(("llamacpp", "openvino", "mlx"), Limits(0.02, 0.3))}
"""In float32. llama.cpp rounds inputs of quantized matrices to 8 bits, and towers to 16-bit floats; mlx-vlm and OpenVINO scale
images as Pillow does, where transformers has torchvision."""
TITLES = {"vllm": "vLLM", "llamacpp": "llama.cpp", "openvino": "OpenVINO", "mlx": "MLX"}
KNOWN = Limits(0.02, 0.3, texts=0.25)
"""In float32 in families that vLLM computes otherwise (`Engines.vllm_differs`)."""
ROUNDED = {False: Limits(0.15, 1.5), True: Limits(0.15, 1.5, share=0.75)}
"""In 16 bits or with quantized weights, by whether tokens are reduced."""


@dataclass(frozen=True)
class Comparison:
    """What to ask and to compare with.

    Attributes:
        source: the checkpoint with the same weights that transformers reads, for files of other engines than vLLM; None: the
            examined folder.
        baseline: the original, for the part of the weights; None: that is not measured.
        prompts: number of questions about small images, of four kinds in turn.
        sizes: large images to ask about (`questions.read_sizes`).
        data: data set with images and questions; None: images are generated.
    """

    source: Path | None = None
    baseline: Path | None = None
    prompts: int = 24
    sizes: Sequence[str] = DEFAULT
    data: Path | None = None
    seed: int = 0


def examine(
    folder: str | Path, engine: str, comparison: Comparison, *, progress: Progress | None = None
) -> list[Check]:
    """Compare the answers of a checkpoint in an engine with those of the same weights in transformers.

    Args:
        engine: "vllm", "llamacpp", "openvino" or "mlx".

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
        data, seed = comparison.data, comparison.seed
        if engine != "vllm":
            reference, exact = _reference(folder, engine, comparison.source)
            reduced, differs = False, None
            requests = make_questions(media, comparison.prompts, data, seed)
        else:
            config = models.read_config(folder)
            reduced = reducer_block.read_reducer(config) is not None
            spec = models.spec_for(config)  # errors in the checkpoint are raised before a model is loaded
            interpreter()
            requests = make_questions(media, comparison.prompts, data, seed)
            requests += vllm_questions(media, requests[0], "mrope_section" in json.dumps(config), seed)
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
            rounds = "linear_attention" in json.dumps(config) and installed().cpu
            exact = not config.get("quantization_config") and not rounds
            differs = spec.engine.vllm_differs(config, installed().cpu)
            if differs:
                line = f"{differs}: answers differ from transformers' already with unquantized weights"
                findings.append(Check("known", True, f"{line} (docs/troubleshooting.md, Engine or weights?)"))
        large = sized_questions(media, comparison.sizes, data, seed, None if engine == "vllm" else reference)
        all_questions = requests + large
        alone = EngineSettings(
            max_tokens=TOKENS,
            logprobs=LOGPROBS,
            dtype="float32" if exact else "auto",
            max_num_seqs=1,
            refusals=len(large),
        )

        def answers_of(name: str, model: Path, questions: list[Request], settings: EngineSettings) -> dict[str, Answer]:
            return engines.get_engine(name).answer(model, questions, media=media, settings=settings).answers

        progress("asking transformers", 1, 3)
        expected = answers_of("hf", reference, all_questions, alone)
        original = answers_of("hf", comparison.baseline, all_questions, alone) if comparison.baseline else None
        progress(f"asking {TITLES[engine]}", 2, 3)
        if engine == "vllm":
            all_questions = all_questions + [replace(request, id=request.id + AGAIN) for request in requests]
            alone = replace(alone, max_num_seqs=BATCH)
        answers = answers_of(engine, folder, all_questions, alone)
        if engine == "openvino":
            expected = without_special_tokens(expected, reference)
        limits = (KNOWN if differs else EXACT[engine]) if exact else ROUNDED[reduced]
        sized = {request.id for request in large}
        findings += judge({name: answer for name, answer in expected.items() if name not in sized}, answers, limits)
        off = offsets(all_questions, expected, answers, media)
        findings += [judge_boxes(off)] if off else []
        if not large:
            return findings
        expected, answers = (
            {name: a for name, a in whole_characters(side).items() if name in sized} for side in (expected, answers)
        )
        most = limits.most if limits.share == 1 else float("inf")  # a reducer may keep other tokens
        findings.append(judge_sizes(expected, answers, most, TITLES[engine]))
        weights = None
        if original:
            weights = whole_characters(original), expected, offsets(large, original, expected, media)
        same = expected, answers, {name: far for name, far in off.items() if name in sized}
        findings.append(verdict(same, weights, limits.most, TITLES[engine], not exact))
    return findings


def _reference(folder: Path, engine: str, source: Path | None) -> tuple[Path, bool]:
    """The checkpoint that transformers reads in place of another engine's files, and whether its weights are not quantized."""
    reference = source or folder
    if engine == "llamacpp" and not llamacpp_server.is_gguf(folder):
        raise UserError(f"{folder} has no model.gguf; write it by export --format gguf")
    if llamacpp_server.is_gguf(reference):
        raise UserError(f"--source {reference} is GGUF, too; give the checkpoint that {folder} was exported from")
    blocks = [json_files.read(path / "config.json").get("quantization_config") or {} for path in (reference, folder)]
    if source and bool(blocks[0]) != ("bits" in blocks[1]):
        raise UserError(
            f"one of {folder} and --source {reference} is quantized; give a checkpoint with the same weights"
        )
    return reference, not blocks[0]


def judge(expected: Mapping[str, Answer], answers: Mapping[str, Answer], limits: Limits) -> list[Check]:
    """Compare transformers' answers with an engine's; repeated questions (`AGAIN`) are compared with their first answer."""
    expected, answers = whole_characters(expected), whole_characters(answers)
    both = [name for name in expected if name in answers and not (answers[name].refused or expected[name].refused)]
    failed = [name for name in expected if name not in both]
    lengths = [name for name in both if answers[name].prompt_tokens != expected[name].prompt_tokens]
    gaps = {name: gap for name in both if (gap := nats(answers[name], expected[name])) is not None}
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
        changed = [name for name in again if (nats(answers[name + AGAIN], answers[name]) or 0.0) > limits.most]
        if limits.texts:
            changed += [name for name in again if answers[name + AGAIN].text != answers[name].text]
        detail = f"{len(again) - len(set(changed))} of {len(again)} answers from caches are the same{_some(changed)}"
        findings.append(Check("asked again", not changed, detail))
    return findings


def _some(names: list[str]) -> str:
    return f"; not {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if names else ""
