"""Finding that vLLM serves a checkpoint as it should: `vlmcompress doctor --engine vllm OUT`.

The real engine answers questions about images under every setting that could change an answer (caches, cut prompts, mixed
batches, aborted neighbours, ...); transformers with the same reducer attached answers them one at a time, without any of
these. `CHECKS` compares the answers. It is meant for reduced checkpoints and works for others, too.

    _questions  conversations            _plan     engines, their settings, rounds of questions
    _reference  transformers' answers    _checks   what is judged
    _findings   all that was said        worker    the engine's side, a process of its own
    _compare    equal but for ties       _names    does it find every tensor, asked of names_worker before all else
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmcompress import models
from vlmcompress.checkpoint import reducer_block
from vlmcompress.checkpoint.convert import convert
from vlmcompress.checkpoint.reducer_block import CarriedReducer
from vlmcompress.common.messages import Finding
from vlmcompress.common.progress import Progress
from vlmcompress.engines.vllm import environment, interpreter, runner
from vlmcompress.engines.vllm.conformance import _names, _plan, _questions
from vlmcompress.engines.vllm.conformance._checks import CHECKS
from vlmcompress.engines.vllm.conformance._findings import Findings
from vlmcompress.engines.vllm.conformance._questions import Questions
from vlmcompress.engines.vllm.conformance._reference import Expected, Reference
from vlmcompress.errors import UserError
from vlmcompress.exporters import compressed_tensors

PROMPTS = 24
SILENCE = 3600.0  # seconds in which one engine must have loaded and answered all
ENGINE = replace(
    runner.ENGINE,
    name="vllm-conformance",
    module=Path(__file__).with_name("worker.py"),
    environment=lambda: environment(VLLM_LOGGING_LEVEL="WARNING") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
)


def examine(folder: str | Path, **settings: Any) -> list[Finding]:
    """Ask the checkpoint in vLLM and in transformers, and compare. Settings and errors are those of `collect`.

    Where vLLM can't load it because of its tensors' names, that is the only check.
    """
    try:
        findings = collect(folder, **settings)
    except _names.Unplaced as error:
        return [Finding("names", False, str(error))]
    return [Finding("names", True, findings.names), *judge(findings)]


def collect(
    folder: str | Path,
    *,
    prompts: int = PROMPTS,
    data: Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Findings:
    """Ask the checkpoint in vLLM and in transformers.

    Args:
        prompts: number of questions, of four kinds in turn.
        data: data set to take images and questions from; None: images are drawn.

    Raises:
        Unplaced: vLLM does not find all tensors.
        UserError: the folder is no checkpoint, its reducer block is not right, there are too few questions, or vLLM is not
            there. What an engine can't do is among the findings.
    """
    folder, progress = Path(folder), progress or (lambda *_: None)
    config = models.read_config(folder)
    found = reducer_block.read(config)
    models.spec_for(config)  # both this and the next line complain, if they do, before a model is loaded
    interpreter()
    with tempfile.TemporaryDirectory(prefix="vlmcompress-conformance-") as place:
        media, view = Path(place, "media"), Path(place, folder.resolve().name)
        media.mkdir()
        asked = _questions.make(media, prompts, data, "mrope_section" in json.dumps(config), seed)
        progress("asking vLLM for the tensors' places", 0, 1)
        names = _names.check(folder)
        findings = _expected(_readable(folder, config, Path(place, "reference")), config, asked, found, progress)
        findings.names = names
        _mirror(folder, view)
        exact = "auto" if config.get("quantization_config") else "float32"
        plan = _plan.engines(view, config, asked, exact, _cut(findings))
        _ask(findings, plan, media, view, progress)
        findings.in_type_of("plain")
    return findings


def judge(findings: Findings) -> list[Finding]:
    """Run each of `CHECKS` on the findings."""
    return [_judged(name, findings) for name in CHECKS]


def _readable(folder: Path, config: dict[str, Any], out: Path) -> Path:
    """The checkpoint where transformers reads its format; else the same weights in compressed-tensors, written to `out`."""
    method = (config.get("quantization_config") or {}).get("quant_method", compressed_tensors.FORMAT)
    if method == compressed_tensors.FORMAT:
        return folder
    convert(folder, out, compressed_tensors.FORMAT)
    return out


def _expected(
    folder: Path, config: dict[str, Any], asked: Questions, carries: CarriedReducer | None, progress: Progress
) -> Findings:
    """Ask transformers, in the checkpoint's own type, and in float32 where it has such a form."""
    exact = not config.get("quantization_config")
    everything = asked.all()
    kinds = [("auto", carries), *([("auto", None)] if carries else []), *([("float32", carries)] if exact else [])]
    done, total = 0, len(kinds) * len(everything)
    answers: list[dict[str, Expected]] = []
    reference = None
    for dtype, wanted in kinds:
        if reference is None or dtype == "float32":
            reference = None  # its memory is free before the next one is loaded
            reference = Reference(folder, dtype)
        answers.append({})
        with reference.reduced(wanted):
            for question in everything:
                progress("asking transformers", done, total)
                answers[-1][question.id] = reference.ask(question.messages, _plan.TOKENS)
                done += 1
    assert reference is not None
    reduced, unreduced = answers[0], answers[1 if carries else 0]
    reducer = carries.reducer if carries else None
    return Findings(asked, reducer, reference.ends, answers[-1] if exact else reduced, reduced, unreduced)


def _cut(findings: Findings) -> int:
    """Number of tokens of a step that is less than any image has, so that each image is cut."""
    smallest = [min(found.kept) for found in findings.exact.values() if found.kept]
    return max(4, min(smallest) // 2) if smallest else 16


def _mirror(folder: Path, view: Path) -> None:
    """Fill a folder with links to all files of a checkpoint but its config.json."""
    view.mkdir()
    for file in folder.resolve().iterdir():
        if file.name != "config.json":
            (view / file.name).symlink_to(file)
    shutil.copy(folder / "config.json", view)


def _ask(findings: Findings, plan: Sequence[dict[str, Any]], media: Path, view: Path, progress: Progress) -> None:
    """Let the engines answer, and note their answers in the findings."""
    job = {"engines": plan, "media": str(media.resolve())}
    lines = [{"id": question.id, "messages": question.messages} for question in findings.questions.all()]
    progress("asking vLLM", 0, len(plan))
    with contextlib.closing(ENGINE.events(job, lines, view, SILENCE, SILENCE)) as events:
        for event in events:
            if event["event"] == "answer":
                findings.engines[event["id"]] = event
                progress("asking vLLM", len(findings.engines), len(plan))


def _judged(name: str, findings: Findings) -> Finding:
    try:
        return Finding(name, True, CHECKS[name](findings))
    except UserError as error:
        return Finding(name, False, str(error))
