"""Finding that vLLM serves a checkpoint as it should: `vlmcompress doctor --engine vllm OUT`.

The real engine answers questions about images under every setting that could change an answer (caches, cut prompts, mixed
batches, aborted neighbours, ...); transformers with the same reducer attached answers them one at a time, without any of
these. `CHECKS` compares the answers. It is meant for reduced checkpoints and works for others, too.

    conformance_plan       conversations; engines, their settings, rounds of questions
    conformance_reference  transformers' answers
    conformance_worker     the engine's side, a process of its own
    conformance_checks     what is judged of all that was said

Before all else vLLM is asked whether it finds the place of every tensor of the checkpoint, and whether every parameter of its
model gets one: before any weight is loaded. `models.unfound` says the same from tables, without vLLM.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmcompress import models
from vlmcompress.engines.vllm import ENGINE as VLLM
from vlmcompress.engines.vllm import conformance_plan, environment, interpreter
from vlmcompress.engines.vllm.conformance_checks import CHECKS, Answers
from vlmcompress.engines.vllm.conformance_plan import Questions
from vlmcompress.engines.vllm.conformance_reference import Expected, Reference
from vlmcompress.export.convert import convert
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.block import CarriedReducer
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import Finding
from vlmcompress.utils.progress import Progress

PROMPTS = 24
SILENCE = 3600.0  # seconds in which one engine must have loaded and answered all
WORKER = Path(__file__).with_name("conformance_worker.py")
ENGINE = replace(
    VLLM,
    name="vllm-conformance",
    module=WORKER,
    environment=lambda: environment(VLLM_LOGGING_LEVEL="WARNING") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
)
NAMES_SILENCE = 1800.0  # seconds in which vLLM must be imported, or a model built
NAMES_ENGINE = replace(
    VLLM, name="vllm-names", module=WORKER, environment=lambda: environment(VLLM_LOGGING_LEVEL="ERROR")
)


class Unplaced(UserError):
    """vLLM does not load the checkpoint, because of its tensors' names."""


def examine(folder: str | Path, **settings: Any) -> list[Finding]:
    """Ask the checkpoint in vLLM and in transformers, and compare. Settings and errors are those of `collect`.

    Where vLLM can't load it because of its tensors' names, that is the only check.
    """
    try:
        answers = collect(folder, **settings)
    except Unplaced as error:
        return [Finding("names", False, str(error))]
    return [Finding("names", True, answers.names), *judge(answers)]


def collect(
    folder: str | Path,
    *,
    prompts: int = PROMPTS,
    data: Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Answers:
    """Ask the checkpoint in vLLM and in transformers.

    Args:
        prompts: number of questions, of four kinds in turn.
        data: data set to take images and questions from; None: images are drawn.

    Raises:
        Unplaced: vLLM does not find all tensors.
        UserError: the folder is no checkpoint, its reducer block is not right, there are too few questions, or vLLM is not
            there. What an engine can't do is among the answers.
    """
    folder, progress = Path(folder), progress or (lambda *_: None)
    config = models.read_config(folder)
    carried = reducer_block.read(config)
    models.spec_for(config)  # both this and the next line complain, if they do, before a model is loaded
    interpreter()
    with tempfile.TemporaryDirectory(prefix="vlmcompress-conformance-") as place:
        media, view = Path(place, "media"), Path(place, folder.resolve().name)
        media.mkdir()
        questions = conformance_plan.make_questions(media, prompts, data, "mrope_section" in json.dumps(config), seed)
        progress("asking vLLM for the tensors' places", 0, 1)
        names = check_names(folder)
        answers = _expected(_readable(folder, config, Path(place, "reference")), config, questions, carried, progress)
        answers.names = names
        _mirror(folder, view)
        exact = "auto" if config.get("quantization_config") else "float32"
        plan = conformance_plan.plan_engines(view, config, questions, exact, _cut(answers))
        _ask(answers, plan, media, view, progress)
        answers.expect_in_type_of("plain")
    return answers


def judge(answers: Answers) -> list[Finding]:
    """Run each of `CHECKS` on the answers."""
    findings = []
    for name, check in CHECKS.items():
        try:
            findings.append(Finding(name, True, check(answers)))
        except UserError as error:
            findings.append(Finding(name, False, str(error)))
    return findings


def _readable(folder: Path, config: dict[str, Any], out: Path) -> Path:
    """The checkpoint where transformers reads its format; else the same weights in compressed-tensors, written to `out`."""
    method = (config.get("quantization_config") or {}).get("quant_method", compressed_tensors.FORMAT)
    if method == compressed_tensors.FORMAT:
        return folder
    convert(folder, out, compressed_tensors.FORMAT)
    return out


def _expected(
    folder: Path, config: dict[str, Any], questions: Questions, carried: CarriedReducer | None, progress: Progress
) -> Answers:
    """Ask transformers, in the checkpoint's own type, and in float32 where it has such a form."""
    exact = not config.get("quantization_config")
    everything = questions.all()
    kinds = [("auto", carried), *([("auto", None)] if carried else []), *([("float32", carried)] if exact else [])]
    done, total = 0, len(kinds) * len(everything)
    by_kind: list[dict[str, Expected]] = []
    reference = None
    for dtype, attached in kinds:
        if reference is None or dtype == "float32":
            reference = None  # its memory is free before the next one is loaded
            reference = Reference(folder, dtype)
        by_kind.append({})
        with reference.reduced(attached):
            for question in everything:
                progress("asking transformers", done, total)
                by_kind[-1][question.id] = reference.ask(question.messages, conformance_plan.TOKENS)
                done += 1
    assert reference is not None
    reduced, unreduced = by_kind[0], by_kind[1 if carried else 0]
    reducer = carried.reducer if carried else None
    return Answers(questions, reducer, reference.ends, by_kind[-1] if exact else reduced, reduced, unreduced)


def _cut(answers: Answers) -> int:
    """Number of tokens of a step that is less than any image has, so that each image is cut."""
    smallest = [min(expected.kept) for expected in answers.exact.values() if expected.kept]
    return max(4, min(smallest) // 2) if smallest else 16


def _mirror(folder: Path, view: Path) -> None:
    """Fill a folder with links to all files of a checkpoint but its config.json."""
    view.mkdir()
    for file in folder.resolve().iterdir():
        if file.name != "config.json":
            (view / file.name).symlink_to(file)
    shutil.copy(folder / "config.json", view)


def _ask(answers: Answers, plan: Sequence[dict[str, Any]], media: Path, view: Path, progress: Progress) -> None:
    """Let the engines answer, and add what they say to the answers."""
    job = {"engines": plan, "media": str(media.resolve())}
    lines = [{"id": question.id, "messages": question.messages} for question in answers.questions.all()]
    progress("asking vLLM", 0, len(plan))
    with contextlib.closing(ENGINE.events(job, lines, view, SILENCE, SILENCE)) as events:
        for event in events:
            if event["event"] == "answer":
                answers.engines[event["id"]] = event
                progress("asking vLLM", len(answers.engines), len(plan))


def tensor_places(folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """What vLLM makes of each folder, as `conformance_worker` says it, by the names given here; in one process."""
    lines = [{"id": name, "folder": str(Path(folder).resolve())} for name, folder in folders.items()]
    first = next(iter(folders.values()))
    with contextlib.closing(NAMES_ENGINE.events({}, lines, first, NAMES_SILENCE, NAMES_SILENCE)) as events:
        return {event["id"]: event for event in events if event["event"] == "answer"}


def check_names(folder: Path) -> str:
    """What is to say of a checkpoint whose tensors vLLM takes.

    Raises:
        Unplaced: it does not take them all, or lacks some.
        UserError: vLLM can't be asked.
    """
    placed = tensor_places({"": folder})[""]
    if "error" in placed:
        raise Unplaced(f"vLLM can't build the model of {folder}: {placed['error']}")
    if lost := placed["lost"]:
        first = min(lost)
        what = f"vLLM has no place for {len(lost)} tensors, first '{first}' ({lost[first]})"
        raise Unplaced(f"{what}; let `vlmcompress quantize` write the original again, it puts names right")
    if missing := placed["missing"]:
        what = f"vLLM's {placed['class']} gets nothing for {len(missing)} parameters, first '{missing[0]}'"
        raise Unplaced(f"{what}; let `vlmcompress quantize` write the original again")
    return f"vLLM's {placed['class']} takes all {len(placed['places'])} tensors by their names, and misses none"
