"""Finding that llama.cpp answers as transformers does: `vlmcompress doctor OUT --engine llamacpp --source CHECKPOINT`.

OUT is GGUF, CHECKPOINT has the same weights in safetensors: the checkpoint that was exported, or the original of an
unquantized OUT. Both answer the same questions, greedily; transformers in float32 where nothing is quantized. llama.cpp rounds
the inputs of quantized matrices to 8 bits and towers to 16-bit floats, so that probabilities differ a little.

| check | what it finds |
|---|---|
| answers | all questions are answered |
| prompts | each prompt has as many tokens: templates, tokenizer, sizes of images |
| first tokens | the log-probability of the likeliest first token is the same, in the median and at most |
| likeliest | it is the same token, unless two are as likely within what the last check allows |
| texts | how many answers are the same; a remark, as one near tie changes all behind it |
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vlmcompress import engines
from vlmcompress.engines import Answer, Request, Run, Settings, llamacpp_server
from vlmcompress.engines.vllm import conformance_plan
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import Finding
from vlmcompress.utils.progress import Progress

TITLES = {"hf": "transformers", "llamacpp": "llama.cpp"}
LIMITS = {False: (0.02, 0.3), True: (0.15, 1.5)}
"""Whether weights are quantized -> how far log-probabilities may differ, nats: in the median, and at most."""


def examine(
    folder: str | Path, source: str | Path, *, prompts: int, data: Path | None, seed: int, progress: Progress
) -> list[Finding]:
    """Ask a GGUF checkpoint in llama.cpp and the same weights in transformers, and compare.

    Args:
        prompts: number of questions, of four kinds in turn.
        data: data set to take images and questions from; None: images are drawn.

    Raises:
        UserError: the folder is no GGUF, there are too few questions, or an engine can't start.
    """
    folder, source = Path(folder), Path(source)
    if not llamacpp_server.is_gguf(folder):
        raise UserError(f"{folder} has no model.gguf; write it by export --format gguf")
    if llamacpp_server.is_gguf(source):
        raise UserError(f"--source {source} is GGUF, too; give the checkpoint that {folder} was exported from")
    blocks = [json_files.read(path / "config.json").get("quantization_config") or {} for path in (source, folder)]
    quantized = bool(blocks[0])
    if quantized != ("bits" in blocks[1]):
        raise UserError(f"one of {folder} and --source {source} is quantized; give a checkpoint with the same weights")
    with tempfile.TemporaryDirectory(prefix="vlmcompress-conformance-") as place:
        media = Path(place)
        questions = conformance_plan.make_questions(media, prompts, data, False, seed).plain
        requests = [Request(question.id, question.messages) for question in questions]
        settings = Settings(max_tokens=8, logprobs=8, dtype="auto" if quantized else "float32", max_num_seqs=1)
        runs: dict[str, Run] = {}
        for name, model in (("hf", source), ("llamacpp", folder)):
            progress(f"asking {TITLES[name]}", len(runs), 2)
            runs[name] = engines.get(name).answer(model, requests, media=media, settings=settings)
    return judge(runs["hf"].answers, runs["llamacpp"].answers, quantized)


def judge(expected: Mapping[str, Answer], answers: Mapping[str, Answer], quantized: bool) -> list[Finding]:
    """Compare the answers to the same questions."""
    failed = [name for name in expected if name not in answers]
    both = [name for name in expected if name in answers]
    lengths = [name for name in both if answers[name].prompt_tokens != expected[name].prompt_tokens]
    distances, others = [], []
    median, most = LIMITS[quantized]
    for name in both:
        first, theirs = answers[name].first, expected[name].first
        if first and theirs:
            token = max(theirs, key=theirs.__getitem__)
            distances.append(abs(first.get(token, min(first.values())) - theirs[token]))
            chosen = max(first, key=first.__getitem__)
            if theirs[token] - theirs.get(chosen, -1e9) > 2 * median:
                others.append(name)
    equal = sum(answers[name].text == expected[name].text for name in both)
    middle, largest = (statistics.median(distances), max(distances)) if distances else (0.0, 0.0)
    return [
        Finding("answers", not failed, f"{len(both)} of {len(expected)} questions answered{_some(failed)}"),
        Finding(
            "prompts", not lengths, f"{len(both) - len(lengths)} prompts with equal counts of tokens{_some(lengths)}"
        ),
        Finding(
            "first tokens",
            middle <= median and largest <= most,
            f"log-probabilities differ by {middle:.2g} in the median and {largest:.2g} at most, nats "
            f"({median:g} and {most:g} allowed)",
        ),
        Finding(
            "likeliest", not others, f"{len(distances) - len(others)} of {len(distances)} are the same{_some(others)}"
        ),
        Finding("texts", True, f"{equal} of {len(both)} answers are the same"),
    ]


def _some(names: list[str]) -> str:
    return f"; not {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if names else ""
