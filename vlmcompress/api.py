"""The Python interface: the verbs of the command line as functions, with the same recipes and the same errors.

    import vlmcompress

    recipe = vlmcompress.Recipe.of("MODEL", "OUT", scheme="awq", calibrate={"data": "images"}, reduce="divprune:0.5")
    checkpoint = vlmcompress.quantize(recipe)
    results = vlmcompress.evaluate(checkpoint.out, "MODEL", limit=200)
    results.suites[0].overall.difference

Recipe keys are those of recipe files. Bad input raises `UserError`; its message is one line that names the problem, its
place and the remedy.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from vlmcompress import engines, models
from vlmcompress.engines import Engine
from vlmcompress.engines.data_parallel import DataParallel
from vlmcompress.engines.hf import ENGINE as TRANSFORMERS
from vlmcompress.engines.local import Local
from vlmcompress.engines.vllm import speculation
from vlmcompress.evaluation.accuracy import accuracy
from vlmcompress.evaluation.accuracy.thoughts import read_marks
from vlmcompress.evaluation.results import Results
from vlmcompress.models import VLM
from vlmcompress.models.data import Reading
from vlmcompress.quantization.inputs import Result
from vlmcompress.quantization.run import quantize as _quantize
from vlmcompress.recipe import Recipe
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks import Attachment
from vlmcompress.reduction.hooks import attach as _attach
from vlmcompress.reduction.support import family_problem
from vlmcompress.utils import hub, workers
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, silent

__all__ = ["Recipe", "Result", "Results", "UserError", "attach", "evaluate", "load", "quantize"]


def quantize(recipe: Recipe, *, restart: bool = False, overwrite: bool = False, progress: Progress = silent) -> Result:
    """Write the checkpoint that a recipe describes.

    Args:
        recipe: what to do; its `out` names the folder to write.
        restart: start over; by default, the finished work of an interrupted run is reused.
        overwrite: replace an existing `out` that vlmcompress wrote.
        progress: called with (label, done, total).

    Returns:
        The folder that was written and its manifest: recipe, sizes, errors of layers by modality, warnings, hashes.

    Raises:
        UserError: bad input; nothing was written.
    """
    return _quantize(recipe, restart=restart, overwrite=overwrite, progress=progress)


def evaluate(
    candidate: str | Path,
    baseline: str | Path,
    *,
    suites: Sequence[str | Path] = (),
    data: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    skip_bad: float = 0,
    engine: str | Engine = "vllm",
    baseline_engine: str | Engine | None = None,
    reduce: str | None = None,
    speculative: str | None = None,
    ray: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    score: str = "auto",
    max_tokens: int | None = None,
    thoughts: str | None = None,
    margins: Mapping[str, float] | None = None,
    journal: str | Path | None = None,
    restart: bool = False,
    progress: Progress = silent,
) -> Results:
    """Ask a candidate and its baseline the same questions and compare their answers in pairs.

    Args:
        candidate: a checkpoint, or a model that the engine's server knows.
        baseline: the original, or the report of an earlier evaluation of it.
        suites: names (`vlmcompress list suites`), task files or data; none: the bundled world.
        data: a local copy of the suite's data; alone: questions and answers.
        columns: field of a sample (`image`, `question`, `answer`, ...) -> the column of `data` that it is read from.
        skip_bad: how many unusable rows may be skipped: below 1 a share, else a number.
        engine: `vllm`, `hf` (transformers) or `openai:URL`, or an `Engine`.
        baseline_engine: the baseline's engine; None: the same one.
        reduce: `METHOD:KEEP`, used in place of the candidate's own reducer; with `hf` only.
        speculative: JSON of vLLM's `--speculative-config`, for the candidate; with `vllm` only.
        ray: a Ray cluster whose workers share the questions: `auto`, `HOST:PORT` of its head, or `local` to start one here.
        limit: maximum number of questions per suite.
        seed: seed of the choice of questions, and of the engine.
        score: how answers to your own `data` are scored: `auto`, or see `vlmcompress eval --help`.
        max_tokens: most tokens of an answer; None: what the suite says, and 4,096 more where the chat template has thoughts.
        thoughts: further marks around thoughts, `OPEN,CLOSE`; those of common models are known.
        margins: allowed drop in accuracy, as a share, by suite; "" for all others.
        journal: file to which answers are appended as they arrive; an interrupted run resumes from it.
        restart: empty the journal and ask all questions again.
        progress: called with (label, done, total).

    Raises:
        UserError: a checkpoint, suite or data is missing, or the engine fails.
    """
    # What changes the candidate alone, a reducer or a draft, becomes a part of its engine; below, two engines are compared.
    if reduce:
        chosen = parse_reducer(reduce)
        if engine != "hf":
            other = engine if isinstance(engine, str) else engine.name
            raise UserError(
                f"--reduce attaches to transformers models, not in {other}; add --engine hf, or quantize --reduce"
            )
        family = models.spec_for(models.read_config(hub.local(candidate, weights="none")))
        if reason := family_problem(family, chosen.method):
            raise UserError(f"--reduce {chosen}: {reason}")
        tested: Engine = dataclasses.replace(TRANSFORMERS, name=f"hf, {chosen}", reduce=str(chosen))
    else:
        tested = _engine(engine)
    if speculative is not None:
        if tested.name != "vllm" or not isinstance(tested, Local):
            raise UserError(f"--speculative-config is for vLLM, not for {tested.name}; leave one of the two out")
        config = speculation.read_speculative_config(Path(hub.local(candidate)), speculative)
        name = f"vllm, {config.get('method', 'draft_model')}"
        tested = dataclasses.replace(tested, name=name, speculative=json.dumps(config))
    before = _engine(baseline_engine or engine)
    if ray is not None and (served := next((side.name for side in (tested, before) if not side.local), None)):
        raise UserError(f"--ray starts engines on the nodes of a cluster, and {served} runs already; leave one out")
    options = accuracy.EvalOptions(
        engine=tested,
        baseline_engine=before,
        limit=limit,
        seed=seed,
        score=score,
        max_tokens=max_tokens,
        marks=read_marks(thoughts),
        margin=margins,
        journal=Path(journal) if journal else None,
        restart=restart,
        progress=progress,
        reading=Reading(columns or {}, skip_bad),
    )
    data_path = Path(data) if data else None
    # With Ray each worker starts both engines, and questions are shared out among the workers.
    if ray is None:
        return accuracy.evaluate(candidate, baseline, suites, data_path, options)
    with closing(workers.of(ray)) as cluster:
        options = dataclasses.replace(
            options, engine=DataParallel(tested, cluster), baseline_engine=DataParallel(before, cluster)
        )
        return accuracy.evaluate(candidate, baseline, suites, data_path, options)


def load(path: str | Path, *, trust_remote_code: bool = False) -> VLM:
    """Load a model (a folder or Hub id) with its processor, on the CPU, in its stored dtype. Pass it to `attach`."""
    return models.load(hub.local(path, code=trust_remote_code), trust_remote_code=trust_remote_code)


def attach(vlm: VLM, reducer: str) -> Attachment:
    """Reduce a transformers model's visual tokens from now on, until `detach` or the end of a `with` block.

    Args:
        vlm: from `load`; one reducer at a time.
        reducer: `METHOD:KEEP` or `METHOD:KEEP,OPTION=VALUE`, as on the command line, e.g. `divprune:0.25`.

    Raises:
        UserError: there is no such reducer, or it does not support this model.
    """
    return _attach(vlm, parse_reducer(reducer))


def _engine(engine: str | Engine) -> Engine:
    return engines.get_engine(engine) if isinstance(engine, str) else engine
