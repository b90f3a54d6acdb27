"""Accuracy of candidate and baseline on the same questions: answered by an engine, scored by the tasks, compared in pairs.

    engine = engines.get_engine("vllm")
    results = evaluate("OUT", "MODEL", ["world"], None, EvalOptions(engine, engine, limit=500))
    results.suites[0].overall.verdict

The baseline may also be an earlier report: its answers are taken from there, provided that the questions are the same.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from vlmcompress.engines import Answer, Engine, EngineSettings
from vlmcompress.evaluation import sides
from vlmcompress.evaluation.accuracy import free_answers, tasks
from vlmcompress.evaluation.accuracy.ask import AnsweredQuestion, SuiteAnswers, ask_suite
from vlmcompress.evaluation.accuracy.compare import (
    MARGIN,
    by_family,
    changed_answers,
    compare,
    families,
    first_token_divergence,
    pairs,
)
from vlmcompress.evaluation.accuracy.free_answers import Score
from vlmcompress.evaluation.accuracy.scoring import normalise
from vlmcompress.evaluation.accuracy.tasks import LoadedSuite
from vlmcompress.evaluation.accuracy.thoughts import MARKS, UNFINISHED, Marks, of_models
from vlmcompress.evaluation.results import Results, Scored, Side, Suite, load_results
from vlmcompress.models.data.sources import PLAIN, Reading
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress
from vlmcompress.utils.work_folder import Journal, open_journal

EXAMPLES = 24  # samples whose pictures go into the report
FIRST_TOKENS = 20  # first tokens whose probabilities are compared


@dataclass(frozen=True)
class EvalOptions:
    """Engines, margins, number of questions and journal of an evaluation.

    Attributes:
        engine, baseline_engine: the engines of the candidates and of the baseline.
        limit, seed: how many questions of each suite are chosen (None: all), and the seed of the choice.
        margin: suite -> allowed drop; "" for all other suites.
        score: how answers to plain data are scored, see `free_answers.named_score`.
        journal: file to which answers are appended as they arrive; an interrupted run resumes from it unless `restart` is set.
        reading: how rows of plain data are read.
        marks: marks around thoughts, which are no part of an answer.
        max_tokens: most tokens of an answer; None: what the suite says, and more for a model that thinks.
    """

    engine: Engine
    baseline_engine: Engine
    limit: int | None = None
    seed: int = 0
    margin: Mapping[str, float] | None = None
    score: str = free_answers.AUTO
    settings: EngineSettings = EngineSettings(logprobs=FIRST_TOKENS)
    journal: Path | None = None
    restart: bool = False
    progress: Progress | None = None
    reading: Reading = PLAIN
    marks: Marks = MARKS
    max_tokens: int | None = None


def evaluate(
    candidate: str | Path,
    baseline: str | Path,
    suites: Sequence[str | Path | None],
    data: Path | None,
    options: EvalOptions,
) -> Results:
    """Compare one candidate with its baseline on every suite. See `evaluate_all`."""
    return next(evaluate_all([candidate], baseline, suites, data, options))


def evaluate_all(
    candidates: Sequence[str | Path],
    baseline: str | Path,
    suites: Sequence[str | Path | None],
    data: Path | None,
    options: EvalOptions,
) -> Iterator[Results]:
    """Compare each of several candidates with one baseline, which answers once.

    Args:
        candidates: checkpoint folders, ids on the Hub, or names of models on the engine's server.
        baseline: one of these, or the report (folder or `results.json`) of an earlier evaluation.
        suites: see `tasks.load_suite`; None is the default suite.
        data: local copy of the suites' data.

    Raises:
        UserError: a checkpoint, suite or data is missing, the engine fails, or the two answered different questions.
    """
    if options.engine.local:
        candidates = [sides.folder(hub.local(path), options.engine.name) for path in candidates]
    recorded = _recorded(baseline)
    if recorded is None and options.baseline_engine.local:
        baseline = sides.folder(hub.local(baseline), options.baseline_engine.name)
    # The engine of a local checkpoint uses its chat template; a server's is unknown.
    local = [*candidates] * options.engine.local + [baseline] * (options.baseline_engine.local and recorded is None)
    thoughts = of_models(*local, marks=options.marks, max_tokens=options.max_tokens)
    loaded = [
        tasks.load_suite(
            name,
            data,
            candidate=candidates[0],
            baseline=Path(recorded.baseline.path) if recorded else baseline,
            limit=options.limit,
            seed=options.seed,
            reading=options.reading,
            thoughts=thoughts,
        )
        for name in suites or [None]
    ]
    named = free_answers.named_score(options.score, loaded)
    # Replay the report first, so that a missing suite fails before an engine starts.
    replayed = [_replay(recorded, suite.name) for suite in loaded] if recorded else None
    with ExitStack() as stack:
        journal = (
            stack.enter_context(open_journal(options.journal, restart=options.restart)) if options.journal else None
        )
        before = replayed or [_answers(baseline, suite, options, journal, "baseline") for suite in loaded]
        scores = [free_answers.choose_score(named, *both) for both in zip(loaded, before, strict=True)]
        before = [score.applied(answers) if score else answers for score, answers in zip(scores, before, strict=True)]
        original = recorded.baseline if recorded else sides.side(baseline, before[0].engine)
        for path in candidates:
            after = [_answers(path, suite, options, journal, "candidate") for suite in loaded]
            after = [score.applied(answers) if score else answers for score, answers in zip(scores, after, strict=True)]
            compared = list(zip(loaded, before, after, scores, strict=True))
            yield _results(
                original,
                sides.side(path, after[0].engine),
                compared,
                options,
                sides.calibration_images(path),
            )


def described(model: str | Path, engine: Engine, reduce: str | None = None) -> Side:
    """The description of a model in the results of its evaluation, before it answers; or the baseline of earlier results.

    Args:
        reduce: the reducer to attach to it, `METHOD:KEEP`; None: none.

    Raises:
        UserError: the checkpoint is missing, or there is no such reducer.
    """
    if recorded := _recorded(model):
        return recorded.baseline
    attached = {"reduce": str(parse_reducer(reduce))} if reduce else {}
    return sides.side(sides.folder(hub.local(model), engine.name) if engine.local else model, attached)


def _answers(
    model: str | Path, suite: LoadedSuite, options: EvalOptions, journal: Journal | None, side: str
) -> SuiteAnswers:
    engine = options.engine if side == "candidate" else options.baseline_engine
    settings = replace(options.settings, seed=options.seed)
    label = f"{side}, {suite.name}" if suite.name != tasks.DEFAULT else side
    return ask_suite(model, suite, engine, settings, journal, options.progress, label)


def _results(
    baseline: Side,
    candidate: Side,
    compared: Sequence[tuple[LoadedSuite, SuiteAnswers, SuiteAnswers, Score | None]],
    options: EvalOptions,
    calibrated: frozenset[str] | None,
) -> Results:
    suites, samples, pictures = [], [], {}
    margins = {"": MARGIN, **(options.margin or {})}
    for suite, before, after, score in compared:
        summary, scored = summarise(suite, before, after, margins.get(suite.name, margins[""]))
        if score:
            summary = summary.model_copy(
                update={"metric": score.metric, "scoring": score.about, "choice": score.choice}
            )
        if calibrated is not None:
            shared = sum(bool(hashes & calibrated) for hashes in after.pictures.values())
            summary = summary.model_copy(update={"calibrated": shared})
        suites.append(summary)
        samples += scored
        differing = [s for s in scored if normalise(s.baseline) != normalise(s.candidate)]
        for sample in changed_answers(differing)[: EXAMPLES // len(compared)]:
            pictures[sample.id] = [base64.b64encode(png).decode() for png in suite.pictures(sample.id)]
    return Results(
        **sides.origin(), baseline=baseline, candidate=candidate, suites=suites, samples=samples, pictures=pictures
    )


def summarise(
    suite: LoadedSuite, before: SuiteAnswers, after: SuiteAnswers, margin: float
) -> tuple[Suite, list[Scored]]:
    """Statistics of a suite that baseline (`before`) and candidate (`after`) have answered, and its samples.

    Raises:
        UserError: the two answered different questions.
    """
    old, new = ([sample.id for sample in answers.samples] for answers in (before, after))
    if set(old) != set(new):
        only = sorted(set(old) ^ set(new))
        raise UserError(
            f"suite {suite.name}: baseline and candidate answered different samples ({len(old)} and {len(new)}, e.g. "
            f"'{only[0]}' only one of them); use the same --suite, --data, --limit and --seed for both"
        )
    if old != new or before.sha256 != after.sha256:
        raise UserError(
            f"suite {suite.name}: baseline and candidate have the same sample ids, but questions, images or answers differ; "
            "evaluate the baseline again"
        )
    summary, divergences = first_token_divergence(
        [sample.answer.first for sample in before.samples], [sample.answer.first for sample in after.samples]
    )
    answered = zip(before.samples, after.samples, divergences, strict=True)
    scored = [
        Scored(
            id=new.id,
            suite=suite.name,
            family=new.family,
            question=new.question,
            expected=new.expected,
            baseline=old.text,
            candidate=new.text,
            baseline_score=0.0 if old.answer.refused else old.score,
            baseline_finish=old.answer.finish,
            candidate_finish=new.answer.finish,
            candidate_score=0.0 if old.answer.refused or new.answer.refused else new.score,
            baseline_parsed=old.parsed,
            candidate_parsed=new.parsed,
            baseline_tokens=old.answer.prompt_tokens,
            candidate_tokens=new.answer.prompt_tokens,
            baseline_visual=old.answer.visual_tokens,
            candidate_visual=new.answer.visual_tokens,
            image=new.image,
            kl=kl,
            baseline_refused=old.answer.refused or "",
            candidate_refused=new.answer.refused or "",
        )
        for old, new, kl in answered
    ]

    def total(count: Callable[[AnsweredQuestion], int]) -> tuple[int, int]:
        return sum(map(count, before.samples)), sum(map(count, after.samples))

    # an engine may not report visual tokens
    accepted = [sample for sample in (*before.samples, *after.samples) if not sample.answer.refused]
    reported = all(sample.answer.visual_tokens is not None for sample in accepted)
    both = [s for s in scored if not s.baseline_refused and not s.candidate_refused]
    return Suite(
        name=suite.name,
        metric=suite.metric,
        source=suite.source,
        sha256=after.sha256,
        samples=len(scored),
        available=suite.available,
        seed=suite.seed,
        max_tokens=suite.max_tokens,
        overall=compare(*pairs(scored), margin=margin),
        families=families(by_family(scored), margin=margin),
        agreement=sum(normalise(s.baseline) == normalise(s.candidate) for s in both) / max(len(both), 1),
        divergence=summary,
        unparsed=total(lambda sample: not sample.parsed),
        refused=total(lambda sample: bool(sample.answer.refused)),
        empty=total(_empty),
        empty_finish=(_empty_finish(before), _empty_finish(after)),
        unfinished=total(lambda sample: sample.answer.finish == UNFINISHED),
        cut_off=total(lambda sample: sample.answer.finish == "length"),
        prompt_tokens=total(lambda sample: sample.answer.prompt_tokens),
        visual_tokens=total(lambda sample: sample.answer.visual_tokens or 0) if reported else None,
        scoring=suite.scoring,
        derived_ids=suite.derived_ids,
    ), scored


def _empty(sample: AnsweredQuestion) -> bool:
    return not sample.text and not sample.missing


def _empty_finish(answers: SuiteAnswers) -> dict[str, int]:
    """Why empty answers ended -> their number."""
    return dict(Counter(sample.answer.finish for sample in answers.samples if _empty(sample)))


def _recorded(baseline: str | Path) -> Results | None:
    """The earlier results at the path `baseline`; None if it is a checkpoint."""
    return load_results(Path(baseline)) if sides.is_report(baseline) else None


def _suite(recorded: Results, name: str) -> Suite:
    suite = next((suite for suite in recorded.suites if suite.name == name), None)
    if suite is None:
        names = ", ".join(suite.name for suite in recorded.suites) or "none"
        raise UserError(f"the baseline's report has no suite '{name}' (it has {names}); evaluate the baseline again")
    return suite


def _replay(recorded: Results, name: str) -> SuiteAnswers:
    """The baseline's answers in an earlier report, which have no token probabilities."""
    samples = tuple(
        AnsweredQuestion(
            id=s.id,
            family=s.family,
            question=s.question,
            expected=s.expected,
            text=s.baseline,
            score=s.baseline_score,
            parsed=s.baseline_parsed,
            image=s.image,
            answer=Answer(
                s.id,
                s.baseline,
                s.baseline_finish or ("refused" if s.baseline_refused else "stop"),
                s.baseline_tokens,
                0,
                visual_tokens=s.baseline_visual,
                refused=s.baseline_refused or None,
            ),
        )
        for s in recorded.samples
        if s.suite == name
    )
    sha256 = _suite(recorded, name).sha256
    return SuiteAnswers(samples, sha256, {}, recorded.baseline.engine, 0.0, len(samples))
