"""Accuracy of a candidate and its baseline on the same questions: asked by an engine, scored by the tasks, compared in pairs.

    engine = engines.get("vllm")
    results = evaluate("OUT", "MODEL", ["world"], None, Ask(engine, engine, limit=500))
    results.suites[0].overall.verdict

The baseline may also be an earlier report: its answers are taken from there, provided that the questions are the same.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from vlmcompress.common import hub
from vlmcompress.engines.base import Answer, Engine, Progress, Settings
from vlmcompress.errors import UserError
from vlmcompress.evaluation import tasks
from vlmcompress.evaluation.ask import Asked, Sample, ask_suite
from vlmcompress.evaluation.compare import MARGIN, by_family, compare, families, pairs
from vlmcompress.evaluation.divergence import divergence
from vlmcompress.evaluation.journal import Journal, open_journal
from vlmcompress.evaluation.scoring import normalise
from vlmcompress.evaluation.tasks import LoadedSuite
from vlmcompress.recipe.reducer import parse
from vlmcompress.results import FILE, Results, Scored, Side, Suite, load, sides

EXAMPLES = 24  # samples whose pictures go into the report
FIRST_TOKENS = 20  # first tokens whose probabilities are compared


@dataclass(frozen=True)
class Ask:
    """Settings of an evaluation: engines, margins, number of questions, journal.

    Attributes:
        engine, baseline_engine: the engines of the candidates and of the baseline.
        margin: the drop that is allowed, per suite; suites that it does not name have that of "".
        journal: file that keeps answers as they come; an interrupted run goes on from there.
    """

    engine: Engine
    baseline_engine: Engine
    limit: int | None = None
    seed: int = 0
    margin: Mapping[str, float] | None = None
    settings: Settings = Settings(logprobs=FIRST_TOKENS)
    journal: Path | None = None
    progress: Progress | None = None

    def margin_of(self, suite: str) -> float:
        margins = {"": MARGIN, **(self.margin or {})}
        return margins.get(suite, margins[""])


def evaluate(
    candidate: str | Path, baseline: str | Path, suites: Sequence[str | Path | None], data: Path | None, how: Ask
) -> Results:
    """Ask candidate and baseline the questions of every suite. See `evaluate_all`."""
    return next(evaluate_all([candidate], baseline, suites, data, how))


def evaluate_all(
    candidates: Sequence[str | Path],
    baseline: str | Path,
    suites: Sequence[str | Path | None],
    data: Path | None,
    how: Ask,
) -> Iterator[Results]:
    """Compare each of several candidates with one baseline, which is asked once.

    Args:
        candidates: checkpoint folders or ids on the Hub, or names that the engine's server knows.
        baseline: a checkpoint or served name, too, or the report (folder or `results.json`) of an earlier evaluation.
        suites: see `tasks.load_suite`; None is the default suite.
        data: local copy of the suites' data.

    Raises:
        UserError: a checkpoint, suite or data is missing, the engine fails, or the two answered different questions.
    """
    if how.engine.local:
        candidates = [sides.checkpoint(hub.local(path)) for path in candidates]
    recorded = _recorded(baseline)
    if recorded is None and how.baseline_engine.local:
        baseline = sides.checkpoint(hub.local(baseline))
    original = Path(recorded.baseline.path) if recorded else baseline
    settings = replace(how.settings, seed=how.seed)
    loaded = [
        tasks.load_suite(name, data, candidate=candidates[0], baseline=original, limit=how.limit, seed=how.seed)
        for name in suites or [None]
    ]
    replayed = [_replay(recorded, suite.name) for suite in loaded] if recorded else None
    with ExitStack() as stack:
        journal = stack.enter_context(open_journal(how.journal)) if how.journal else None
        befores = replayed or [
            _ask(baseline, suite, how.baseline_engine, settings, journal, how, "baseline") for suite in loaded
        ]
        asked = list(zip(loaded, befores, strict=True))
        about = recorded.baseline if recorded else sides.side(baseline, asked[0][1].engine)
        for path in candidates:
            found = [
                (suite, before, _ask(path, suite, how.engine, settings, journal, how, "candidate"))
                for suite, before in asked
            ]
            yield _results(about, sides.side(path, found[0][2].engine), found, how, recorded)


def described(model: str | Path, engine: Engine, reduce: str | None = None) -> Side:
    """Describe a model as the results of its evaluation will, without asking it; or the baseline of earlier results.

    Args:
        reduce: the reducer that is attached to it, `METHOD:KEEP`; None: none.

    Raises:
        UserError: the checkpoint is missing, or there is no such reducer.
    """
    if recorded := _recorded(model):
        return recorded.baseline
    attached = {"reduce": str(parse(reduce))} if reduce else {}
    return sides.side(sides.checkpoint(hub.local(model)) if engine.local else model, attached)


def _ask(
    model: str | Path,
    suite: LoadedSuite,
    engine: Engine,
    settings: Settings,
    journal: Journal | None,
    how: Ask,
    label: str,
) -> Asked:
    label = f"{label}, {suite.name}" if suite.name != tasks.DEFAULT else label
    return ask_suite(model, suite, engine, settings, journal, how.progress, label)


def _results(
    baseline: Side,
    candidate: Side,
    found: Sequence[tuple[LoadedSuite, Asked, Asked]],
    how: Ask,
    recorded: Results | None,
) -> Results:
    suites, samples, pictures = [], [], {}
    for suite, before, after in found:
        summary, scored = summarise(suite, before, after, how.margin_of(suite.name))
        if recorded:
            then = _suite(recorded, suite.name)
            summary = summary.model_copy(update={"cut_off": (then.cut_off[0], summary.cut_off[1])})
        suites.append(summary)
        samples += scored
        for sample in differing(scored)[: EXAMPLES // len(found)]:
            pictures[sample.id] = [base64.b64encode(png).decode() for png in suite.pictures(sample.id)]
    return Results(
        **sides.origin(), baseline=baseline, candidate=candidate, suites=suites, samples=samples, pictures=pictures
    )


def summarise(suite: LoadedSuite, before: Asked, after: Asked, margin: float) -> tuple[Suite, list[Scored]]:
    """Compute the statistics of a suite that candidate and baseline have answered, and list its samples.

    Raises:
        UserError: the two answered different questions.
    """
    _check_same(suite.name, before, after)
    moved, by_sample = divergence(
        [sample.answer.first for sample in before.samples], [sample.answer.first for sample in after.samples]
    )
    answered = zip(before.samples, after.samples, by_sample, strict=True)
    scored = [_scored(suite.name, old, new, kl) for old, new, kl in answered]
    both = (before.samples, after.samples)
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
        agreement=sum(normalise(s.baseline) == normalise(s.candidate) for s in scored) / len(scored),
        divergence=moved,
        unparsed=_count(both, lambda sample: not sample.parsed),
        empty=_count(both, lambda sample: not sample.text),
        cut_off=_count(both, lambda sample: sample.answer.finish == "length"),
        prompt_tokens=_count(both, lambda sample: sample.answer.prompt_tokens),
        visual_tokens=_visual(both),
        scoring=suite.scoring,
        derived_ids=suite.derived_ids,
    ), scored


def _count(both: tuple[Sequence[Sample], Sequence[Sample]], of) -> tuple[int, int]:
    first, second = (sum(map(of, samples)) for samples in both)
    return first, second


def _visual(both: tuple[Sequence[Sample], Sequence[Sample]]) -> tuple[int, int] | None:
    """Count the visual tokens of all prompts, baseline and candidate; None where an engine does not report them."""
    known = all(sample.answer.visual_tokens is not None for samples in both for sample in samples)
    return _count(both, lambda sample: sample.answer.visual_tokens) if known else None


def _scored(suite: str, before: Sample, after: Sample, kl: float | None) -> Scored:
    return Scored(
        id=after.id,
        suite=suite,
        family=after.family,
        question=after.question,
        expected=after.expected,
        baseline=before.text,
        candidate=after.text,
        baseline_score=before.score,
        candidate_score=after.score,
        baseline_parsed=before.parsed,
        candidate_parsed=after.parsed,
        baseline_tokens=before.answer.prompt_tokens,
        candidate_tokens=after.answer.prompt_tokens,
        baseline_visual=before.answer.visual_tokens,
        candidate_visual=after.answer.visual_tokens,
        image=after.image,
        kl=kl,
    )


def differing(scored: Sequence[Scored]) -> list[Scored]:
    """Sort samples that the two answered differently: lost ones first, then gained, then the rest; families in turn."""
    groups: dict[tuple[int, str], list[Scored]] = {}
    for sample in scored:
        if normalise(sample.baseline) != normalise(sample.candidate):
            change = sample.candidate_score - sample.baseline_score
            kind = 0 if change < 0 else 1 if change > 0 else 2
            groups.setdefault((kind, sample.family), []).append(sample)
    ranked = [(kind, turn, family, s) for (kind, family), group in groups.items() for turn, s in enumerate(group)]
    return [sample for *_, sample in sorted(ranked, key=lambda row: row[:3])]


def _check_same(suite: str, before: Asked, after: Asked) -> None:
    """Refuse to pair answers to different questions."""
    old, new = ([sample.id for sample in asked.samples] for asked in (before, after))
    if set(old) != set(new):
        only = sorted(set(old) ^ set(new))
        raise UserError(
            f"suite {suite}: baseline and candidate answered different samples ({len(old)} and {len(new)}, e.g. "
            f"'{only[0]}' only one of them); use the same --suite, --data, --limit and --seed for both"
        )
    if old != new or before.sha256 != after.sha256:
        raise UserError(
            f"suite {suite}: baseline and candidate have the same sample ids, but questions, images or answers differ; "
            "evaluate the baseline again"
        )


def _recorded(baseline: str | Path) -> Results | None:
    """Load the earlier results that `baseline` names; None if it names a checkpoint."""
    path = Path(baseline)
    is_report = (path / FILE).is_file() and not (path / "config.json").is_file()
    return load(path) if path.suffix == ".json" or is_report else None


def _suite(recorded: Results, name: str) -> Suite:
    found = next((suite for suite in recorded.suites if suite.name == name), None)
    if found is None:
        known = ", ".join(suite.name for suite in recorded.suites) or "none"
        raise UserError(f"the baseline's report has no suite '{name}' (it has {known}); evaluate the baseline again")
    return found


def _replay(recorded: Results, name: str) -> Asked:
    """Take the baseline's answers from an earlier evaluation. They lack token probabilities."""
    samples = tuple(
        Sample(
            id=s.id,
            family=s.family,
            question=s.question,
            expected=s.expected,
            text=s.baseline,
            score=s.baseline_score,
            parsed=s.baseline_parsed,
            image=s.image,
            answer=Answer(s.id, s.baseline, "stop", s.baseline_tokens, 0, visual_tokens=s.baseline_visual),
        )
        for s in recorded.samples
        if s.suite == name
    )
    sha256 = _suite(recorded, name).sha256
    return Asked(samples, sha256, {}, recorded.baseline.engine, 0.0, len(samples))
