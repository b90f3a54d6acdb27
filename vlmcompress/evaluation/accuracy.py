"""Exact-match accuracy of a candidate and its baseline on the same questions, both answering in vLLM.

    results = evaluate("OUT", "MODEL", "data.jsonl", limit=500)
    write_report(results, "OUT/eval")

Each checkpoint is loaded once and answers greedily. An answer counts when it equals the expected one after `normalise`
(space, case and a final full stop don't matter). Samples are paired by id; `paired` has the statistics.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vlmcompress.calibration.rows import Sample
from vlmcompress.engines.vllm.runner import Answer, Progress, Run, Settings, answer
from vlmcompress.errors import UserError
from vlmcompress.evaluation import questions
from vlmcompress.evaluation.paired import Paired, compare

SCHEMA = 1
EXAMPLES = 24  # with pictures, in the report


@dataclass(frozen=True)
class Scored:
    """One question, the expected answer, and what each checkpoint answered. `image` names the images it is about."""

    id: str
    family: str
    question: str
    expected: str
    baseline: str
    candidate: str
    baseline_right: bool
    candidate_right: bool
    image: str


@dataclass(frozen=True)
class Checkpoint:
    """One side of the comparison. `weight_bytes` is the size of its safetensors files; the counts are of answers that
    were empty, or cut off at the token limit before the model was done."""

    path: str
    weight_bytes: int
    empty: int
    cut_off: int
    seconds: float
    prompt_tokens: int
    engine: dict[str, Any]


@dataclass(frozen=True)
class Results:
    """What an evaluation found.

    Attributes:
        agreement: share of questions to which both gave the same answer, right or wrong.
        pictures: PNG images of some samples that the two answered differently, by id; for the report, not for JSON.
    """

    data: dict[str, Any]
    baseline: Checkpoint
    candidate: Checkpoint
    overall: Paired
    families: dict[str, Paired]
    agreement: float
    samples: tuple[Scored, ...]
    created: str
    pictures: dict[str, list[bytes]] = field(default_factory=dict, repr=False)
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """For JSON: everything but the pictures."""
        plain = {name: value for name, value in vars(self).items() if name != "pictures"}
        plain |= {name: dict(vars(plain[name])) for name in ("baseline", "candidate", "overall")}
        plain["families"] = {name: dict(vars(paired)) for name, paired in self.families.items()}
        plain["samples"] = [dict(vars(sample)) for sample in self.samples]
        return plain


def evaluate(
    candidate: str | Path,
    baseline: str | Path,
    data: str | Path | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Results:
    """Ask both checkpoints the same questions in vLLM, one checkpoint after the other.

    Args:
        candidate, baseline: checkpoint folders.
        data: JSONL, parquet or another source with `image`, `question`, `answer` and optionally `family`; None: the
            test split that is bundled with the demo models.
        limit: ask only so many, drawn from all families in proportion and always the same ones for a seed.
        progress: called with (label, done, total).

    Raises:
        UserError: a checkpoint or data is missing, the data has no answers, or the engine fails.
    """
    more = {"limit": limit, "seed": seed, "settings": settings, "progress": progress}
    return next(evaluate_all([candidate], baseline, data, **more))  # type: ignore[arg-type]


def evaluate_all(
    candidates: Sequence[str | Path],
    baseline: str | Path,
    data: str | Path | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Iterator[Results]:
    """`evaluate` for each of several candidates; the baseline is asked once."""
    folders, baseline = [Path(candidate) for candidate in candidates], Path(baseline)
    for path in (*folders, baseline):
        _check_checkpoint(path)
    samples, source = questions.load(data, folders[0], baseline, seed)
    chosen = questions.stratified(samples, limit, seed)
    settings = settings or Settings(max_tokens=max(32, *(len(s.answer or "") for s in chosen)), seed=seed)
    with tempfile.TemporaryDirectory(prefix="vlmcompress-eval-") as media:
        requests, images = questions.write_requests(chosen, Path(media))

        def ask(path: Path, label: str) -> Run:
            return answer(path, requests, media=Path(media), settings=settings, label=label, progress=progress)

        before = ask(baseline, "baseline")
        about = {
            "source": str(source),
            "sha256": questions.fingerprint(chosen, images),
            "samples": len(chosen),
            "available": len(samples),
            "seed": seed,
            "max_tokens": settings.max_tokens,
        }
        for path in folders:
            after = ask(path, "candidate")
            scored = [
                _score(s, i, before.answers[s.id], after.answers[s.id]) for s, i in zip(chosen, images, strict=True)
            ]
            results = summarise(scored, about, _checkpoint(baseline, before), _checkpoint(path, after))
            shown = {sample.id for sample in differing(scored)[:EXAMPLES]}
            pictures = {s.id: [questions.png(image) for image in s.images] for s in chosen if s.id in shown}
            yield replace(results, pictures=pictures)


def summarise(scored: Sequence[Scored], data: dict, baseline: Checkpoint, candidate: Checkpoint) -> Results:
    """The statistics of scored samples, overall and by family."""
    names = sorted({s.family for s in scored})
    return Results(
        data=data,
        baseline=baseline,
        candidate=candidate,
        overall=_compare(scored),
        families={name: _compare([s for s in scored if s.family == name]) for name in names},
        agreement=sum(normalise(s.baseline) == normalise(s.candidate) for s in scored) / len(scored),
        samples=tuple(scored),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def differing(scored: Sequence[Scored]) -> list[Scored]:
    """Samples that the two answered differently: lost ones first, then gained, then both wrong; families in turn."""
    groups: dict[tuple[int, str], list[Scored]] = {}
    for sample in scored:
        if normalise(sample.baseline) != normalise(sample.candidate):
            kind = 0 if sample.baseline_right else 1 if sample.candidate_right else 2
            groups.setdefault((kind, sample.family), []).append(sample)
    ranked = [(kind, turn, family, s) for (kind, family), group in groups.items() for turn, s in enumerate(group)]
    return [sample for *_, sample in sorted(ranked, key=lambda row: row[:3])]


def normalise(text: str) -> str:
    """What is compared: case-folded, spaces collapsed, one final full stop dropped."""
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()


def _score(sample: Sample, image: str, baseline: Answer, candidate: Answer) -> Scored:
    expected = sample.answer or ""
    return Scored(
        id=sample.id,
        family=sample.family or questions.WITHOUT_FAMILY,
        question=sample.question,
        expected=expected,
        baseline=baseline.text.strip(),
        candidate=candidate.text.strip(),
        baseline_right=normalise(baseline.text) == normalise(expected),
        candidate_right=normalise(candidate.text) == normalise(expected),
        image=image,
    )


def _compare(scored: Sequence[Scored]) -> Paired:
    return compare([s.baseline_right for s in scored], [s.candidate_right for s in scored], [s.image for s in scored])


def _checkpoint(path: Path, run: Run) -> Checkpoint:
    return Checkpoint(
        path=str(path),
        weight_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
        empty=sum(not normalise(a.text) for a in run.answers.values()),
        cut_off=sum(a.finish == "length" for a in run.answers.values()),
        seconds=run.seconds,
        prompt_tokens=sum(a.prompt_tokens for a in run.answers.values()),
        engine=run.engine,
    )


def _check_checkpoint(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint folder")
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: not a checkpoint, it has no config.json")
