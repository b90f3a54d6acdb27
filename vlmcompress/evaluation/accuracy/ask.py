"""One checkpoint's answers to a suite: lm-eval builds prompts and scores, an engine answers, a journal keeps the answers.

An answer's key in the journal is a SHA-256 of everything that it depends on: the checkpoint's files, the engine, the messages
with their images' contents, and the limits. Stop strings are not included, as answers are cut at them afterwards. So one
journal serves any number of checkpoints and suites.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vlmcompress.engines import Answer, Engine, EngineSettings, Request
from vlmcompress.evaluation.accuracy.tasks import LoadedSuite, Place, quiet_lm_eval, task_metric
from vlmcompress.evaluation.accuracy.thoughts import UNFINISHED
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import temporary_folder
from vlmcompress.utils.identity import json_digest, model_files, unchanged
from vlmcompress.utils.progress import Progress
from vlmcompress.utils.schema import first_problem
from vlmcompress.utils.work_folder import Journal

REFUSED = 0.1
"""The share of a suite's samples that an engine may refuse."""

SEPARATOR = " | "  # between several reference answers in one string
SETTINGS = ("max_model_len", "dtype", "logprobs")  # besides max_tokens, those that an answer depends on
_ANSWER = TypeAdapter(Answer)


@dataclass(frozen=True)
class AnsweredQuestion:
    """One answered question.

    Attributes:
        expected: the reference answer, or several joined by `SEPARATOR`.
        text: the answer without thoughts, cut at the task's stop strings.
        score: in 0 to 1; 0 if no answer could be parsed from the text (`parsed` is False), if the engine refused it, or if its
            thoughts do not end.
        image: identifier of the question's images or videos, equal for equal images.
    """

    id: str
    family: str
    question: str
    expected: str
    text: str
    score: float
    parsed: bool
    image: str
    answer: Answer

    @property
    def missing(self) -> bool:
        """Whether there is no answer to score: it was refused, or its thoughts do not end."""
        return bool(self.answer.refused) or self.answer.finish == UNFINISHED


@dataclass(frozen=True)
class SuiteAnswers:
    """A checkpoint's answers to a suite, in the suite's order.

    Attributes:
        sha256: hash of all questions, to check that two checkpoints got the same ones.
        metrics: task -> metric -> value, as lm-eval aggregates them.
        engine: the engine's description of itself.
        seconds: time that the engine took to answer, without its start.
        resumed: number of answers that came from the journal.
        pictures: sample id -> hashes of its images, as in a manifest's calibration data.
    """

    samples: tuple[AnsweredQuestion, ...]
    sha256: str
    metrics: dict[str, dict[str, float]]
    engine: dict[str, Any]
    seconds: float
    resumed: int
    pictures: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> float:
        """Mean number of tokens of a prompt for the language model."""
        return sum(sample.answer.prompt_tokens for sample in self.samples) / len(self.samples)


def ask_suite(
    model: str | Path,
    suite: LoadedSuite,
    engine: Engine,
    settings: EngineSettings | None = None,
    journal: Journal | None = None,
    progress: Progress | None = None,
    label: str = "answering",
) -> SuiteAnswers:
    """Answer all questions of a suite with a checkpoint; answers in the journal are reused.

    Args:
        model: checkpoint folder, or its name on the server.
        settings: settings of the engine, except for the length of answers, which the task decides.
        journal: journal to which answers are appended as they arrive; None: they are not kept.
        progress: called with (label, done, total).

    Raises:
        UserError: the engine fails, an image is missing, a score can't be paired, or the journal can't be written.
    """
    from lm_eval.evaluator import evaluate

    from vlmcompress.evaluation.accuracy.lm import EngineLM

    places = {(place.task, place.index): place for place in suite.places}
    with temporary_folder("eval") as media:
        answer = _JournalledEngine(model, engine, settings or EngineSettings(), journal, progress, label, media)
        lm = EngineLM(answer, lambda instance: places[instance.task_name, instance.doc_id].id, media, suite.thoughts)
        for task in suite.tasks.values():
            # As in lm-eval's `evaluator.py::simple_evaluate` before `evaluate`, which does not accept None.
            task.set_config("num_fewshot", task.config.num_fewshot or 0)
            task.set_fewshot_seed(suite.seed)
        with quiet_lm_eval():
            evaluation = evaluate(
                lm=lm,
                task_dict={"tasks": dict(suite.tasks)},
                bootstrap_iters=0,
                apply_chat_template=True,
                fewshot_as_multiturn=True,
            )
    rows: dict[tuple[str, int], Mapping[str, Any]] = {}
    for task, logged in evaluation["samples"].items():
        for row in logged:
            rows.setdefault((task, row["doc_id"]), row)  # the first of several filters counts
    samples = tuple(
        _sample(place, rows[key], task_metric(suite.tasks[place.task]), lm.requests[place.id], lm.answers[place.id])
        for key, place in places.items()
    )
    metrics: dict[str, dict[str, float]] = {}
    for task, results in evaluation["results"].items():
        numbers = metrics.setdefault(task, {})
        for name, value in results.items():  # `name,filter`; the first filter counts, and no standard errors
            plain, comma, _ = name.partition(",")
            if comma and not plain.endswith("_stderr") and isinstance(value, int | float):
                numbers.setdefault(plain, float(value))
    return SuiteAnswers(
        samples=samples,
        sha256=_fingerprint(samples, lm.requests),
        metrics=metrics,
        engine=answer.about,
        seconds=answer.seconds,
        resumed=answer.resumed,
        pictures=lm.pictures,
    )


@dataclass(frozen=True)
class Identity:
    """The checkpoint and the engine that an answer belongs to."""

    model: str
    engine: str


def identify(model: str | Path, engine: str) -> Identity:
    """The identity of a checkpoint folder, by its files' names, sizes and times, or of a served model, by its name."""
    folder = Path(model)
    if not folder.is_dir():
        return Identity(str(model), engine)
    return Identity(json_digest(unchanged(model_files(folder))), engine)


def key(identity: Identity, request: Request, settings: EngineSettings) -> str:
    """The journal key of an answer. Images are named by content (`lm.write_image`), so their folder is left out."""
    limits = {name: getattr(settings, name) for name in SETTINGS}
    limits["max_tokens"] = settings.max_tokens if request.max_tokens is None else request.max_tokens
    limits |= {} if request.keep is None else {"keep": request.keep}
    what = [asdict(identity), without_folders(request.messages), limits]
    return json_digest(what)


def without_folders(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reduce the `file:` addresses of images in messages to the file's name, which is a hash of its content."""
    return json.loads(json.dumps(messages), object_hook=_without_folder)


def _without_folder(value: dict[str, Any]) -> dict[str, Any]:
    if isinstance(value.get("url"), str) and value["url"].startswith("file:"):
        return value | {"url": value["url"].rpartition("/")[2]}
    return value


def answered(journal: Journal, keys: Mapping[str, str]) -> dict[str, Answer]:
    """id -> answer, for those of `keys` (id -> key) that are in the journal. `UserError` if an entry is not an answer."""
    entries = {id: entry for id, key in keys.items() if (entry := journal.read(key)) is not None}
    try:
        return {id: replace(_ANSWER.validate_python(entry), id=id) for id, entry in entries.items()}
    except ValidationError as error:
        raise UserError(f"{journal.path}: an answer's {first_problem(error)}; begin anew with --restart") from error


class _JournalledEngine:
    """Answer requests from the journal if possible, else by the engine, whose time is summed up."""

    def __init__(
        self,
        model: str | Path,
        engine: Engine,
        settings: EngineSettings,
        journal: Journal | None,
        progress: Progress | None,
        label: str,
        media: Path,
    ):
        self._model, self._engine, self._settings, self._journal = model, engine, settings, journal
        self._progress, self._label, self._media = progress, label, media
        self._identity = identify(model, engine.name)
        self.about: dict[str, Any] = {}
        self.seconds, self.resumed = 0.0, 0

    def __call__(self, requests: Sequence[Request]) -> Mapping[str, Answer]:
        keys = {request.id: key(self._identity, request, self._settings) for request in requests}
        answers = {} if self._journal is None else answered(self._journal, keys)
        rest = [request for request in requests if request.id not in answers]
        settings = replace(self._settings, refusals=int(REFUSED * len(requests)))
        self.resumed += len(answers)
        if rest:
            run = self._engine.answer(
                self._model,
                rest,
                media=self._media,
                settings=settings,
                label=self._label,
                progress=self._progress,
                on_answer=lambda answer: self._keep(keys[answer.id], answer),
            )
            answers |= run.answers
            self.about, self.seconds = run.engine, self.seconds + run.seconds
        if self._journal is not None:  # for a later run that finds all its answers in the journal
            about = f"engine {self._identity.engine} {self._identity.model}"
            if self.about:
                self._journal.write(about, self.about)
            written = self._journal.read(about)
            self.about = written if isinstance(written, dict) else {}
        return answers

    def _keep(self, key: str, answer: Answer) -> None:
        if self._journal is not None and not answer.refused:  # another run may succeed
            self._journal.write(key, asdict(answer))


def _sample(place: Place, row: Mapping[str, Any], name: str, request: Request, answer: Answer) -> AnsweredQuestion:
    target = row["target"]
    targets = list(dict.fromkeys(map(str, target))) if isinstance(target, list) else [str(target)]
    last = next(turn for turn in reversed(request.messages) if turn["role"] == "user")
    files = [Path(part[part["type"]]["url"]).stem for part in request.media()]
    missing = bool(answer.refused) or answer.finish == UNFINISHED
    value = 0.0 if missing else row.get(name)
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise UserError(
            f"task {place.task}: its metric {name} gives {str(value)[:60]} for sample '{place.id}', not a number in "
            "0 to 1; name a metric of single samples first in metric_list"
        )
    return AnsweredQuestion(
        id=place.id,
        family=place.family,
        question="".join(part["text"] for part in last["content"] if part["type"] == "text").strip(),
        expected=SEPARATOR.join(targets),
        text=answer.text.strip(),
        score=float(value),
        parsed=bool(row.get("parsed", True)) or missing,
        image="+".join(files) or f"text:{place.id}",
        answer=answer,
    )


def _fingerprint(samples: Sequence[AnsweredQuestion], requests: Mapping[str, Request]) -> str:
    """Hash ids, families, prompts, pixels and expected answers of all samples."""
    digest = hashlib.sha256()
    for sample in samples:
        messages = without_folders(requests[sample.id].messages)
        digest.update(json.dumps([sample.id, sample.family, messages, sample.expected]).encode())
    return digest.hexdigest()
