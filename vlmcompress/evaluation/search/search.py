"""A search from a request to a folder: checks, the race of candidates, and placing the winner's checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vlmcompress.evaluation.accuracy import noninferiority, tasks
from vlmcompress.evaluation.accuracy.compare import LEVEL
from vlmcompress.evaluation.accuracy.free_answers import choose_score
from vlmcompress.evaluation.accuracy.paired import MeanDifference
from vlmcompress.evaluation.search import outcome, own_answers, space
from vlmcompress.evaluation.search.candidate import AS_IT_IS, Candidate
from vlmcompress.evaluation.search.live_trials import SHARE, LiveTrials, original
from vlmcompress.evaluation.search.racing import Race
from vlmcompress.evaluation.search.speed import STAND_IN, Goal, Measured, Modelled, TypicalRequest
from vlmcompress.evaluation.search.trial import Setup, ensure_checkpoint, questions_of
from vlmcompress.evaluation.search.trial_log import QUESTIONS, WORK, open_trial_log
from vlmcompress.export.write import rename
from vlmcompress.models.data import Reading, bundled_data, data_hash, load_mixed
from vlmcompress.recipe import resolve, targets
from vlmcompress.utils import hub, workers
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import link_or_copy, new_folder, save_files
from vlmcompress.utils.identity import content_hash, image_digest, model_hash
from vlmcompress.utils.progress import Progress
from vlmcompress.utils.text import duration

WINNER, RECIPE = "winner", "recipe.yaml"
_LEAST = 30
"""Minimum number of questions."""
_CHANCE = 0.1
"""Maximum share of questions without image, such as sums, that may occur in both data sets by chance."""
_TEXT = "text:"


@dataclass(frozen=True)
class SearchRequest:
    """The settings of a search.

    Attributes:
        base: recipe keys of all candidates: `model`, `calibrate`, `seed`, and `target`, None for this machine.
        out: folder of the search.
        data, suite, limit: the questions, as for `vlmcompress eval`.
        confirm: other questions for the winner; None: it is not confirmed.
        images: folder of images from which all questions are made (`own_answers`), at most `limit` of them; None: `data`.
        prompts: the questions about these images.
        margin: the allowed loss, as a share.
        budget: seconds; None: no limit.
        space: file of the space; None: the default space, a small one for `images`.
    """

    base: Mapping[str, Any]
    out: Path
    data: str | None = None
    suite: str | None = None
    confirm: str | None = None
    images: str | None = None
    prompts: Sequence[str] = ()
    limit: int | None = None
    margin: float = 0.01
    goal: Goal = "throughput"
    load: TypicalRequest = field(default_factory=TypicalRequest)
    budget: float | None = None
    engine: str = "vllm"
    ray: str | None = None
    space: str | None = None

    @property
    def seed(self) -> int:
        """The random seed."""
        return int(self.base.get("seed", 0))


def run_search(request: SearchRequest, progress: Progress) -> tuple[SearchRequest, dict[str, Any], Path | None]:
    """Run or resume a search.

    Returns:
        The request, with the files of the questions that were made of images; the search's result as data; the winner's
        folder or None.

    Raises:
        UserError: bad input, or the original fails. The folder keeps the results until then.
    """
    # What machine, model and space do not allow is refused before a question is asked.
    setup = setup_of(request)
    parts = own_answers.split_images(request.images, request.limit, request.margin) if request.images else None
    gains = _gains(request, setup)
    base, small = setup.base, request.images is not None
    where = space.read_space(request.space, base) if request.space else space.usual(base, small=small)
    if parts:
        files = own_answers.write_questions(parts, request.prompts, request.out / QUESTIONS, setup, progress)
        calibrate = {"data": str(files[own_answers.CALIBRATION]), "samples": len(parts.calibration)}
        data, confirm = str(files[own_answers.SEARCH]), str(files[own_answers.CONFIRM])
        base = {**request.base, "calibrate": calibrate}
        request = replace(request, base=base, data=data, confirm=confirm, limit=None)
        setup = setup_of(request)
        gains = _gains(request, setup)
    suite = questions_of(setup, request.limit)
    count = len(suite)
    confirming, images = _confirming(request, setup, count)
    with open_trial_log(request.out, _about(setup, suite), request.budget) as log:
        with closing(workers.of(request.ray)) as crew:
            before = original(setup, count, crew, log, progress)
            if score := choose_score(None, suite, before):
                before = score.applied(before)
            if log.left <= 0:
                raise UserError(
                    f"--max-time is spent: asking the original took {duration(log.spent)}; give a longer one, which goes on "
                    "from here, or fewer questions (--limit)"
                )
            reserve = 2.4 * confirming * (log.note("seconds") or 0.0)  # the original, the winner, and some more
            reserve = max(reserve, SHARE * (request.budget or 0.0))
            live = LiveTrials(setup, crew, log, gains, before, score, progress, reserve)
            race = Race(where.factors, live, request.margin, count, images)
            winner = race.run()
        settings = {
            "model": hub.source_facts(setup.base["model"])["source"],
            "target": setup.base.get("target"),
            "max_drop": request.margin,
            "optimize": request.goal,
            "gains": gains.source,
            "seed": request.seed,
            "engine": request.engine,
            "reference": "the original's own answers" if request.images else "the data's answers",
        }
        accuracy = statistics.fmean(sample.score for sample in before.samples)
        facts = {
            "schema_version": outcome.SCHEMA_VERSION,
            **settings,
            "original": {"name": AS_IT_IS, "accuracy": accuracy},
            **outcome.candidates(race, winner, measured=gains.source == "measured"),
            "seconds": round(log.spent, 1),
            "ended_by_budget": live.late,
            "left_out": dict(where.left_out),
        }
        folder = _placed(request, setup, winner.candidate, progress) if winner else None
        log.finish()
    return request, facts, folder


def _about(setup: Setup, questions: tasks.LoadedSuite) -> dict[str, Any]:
    """The inputs of trials: hashes of the model, the questions and the calibration data, independent of their paths."""
    suite = setup.suite
    settings = resolve({**setup.base, "scheme": "none"}).recipe.calibrate
    images = settings.data or bundled_data(setup.model, "calibration")
    described = settings.model_dump(exclude={"data", "text"})
    if images:
        text = hub.local(settings.text, "dataset") if settings.text else None
        options: dict[str, Any] = {"samples": settings.samples, "seed": setup.seed, "reading": Reading.of(settings)}
        samples, texts = load_mixed(hub.local(images, "dataset"), text, **options)
        described["samples_sha256"] = data_hash([*samples, *texts])
    return {  # another seed or number chooses other samples, so these come before the samples' hashes
        "seed": setup.seed,
        "questions": len(questions),
        "model": model_hash(setup.model),
        "engine": setup.engine,
        "data": questions.content_hash(),
        "suite": content_hash([Path(suite)]) if suite and Path(suite).is_file() else suite,
        "calibration": described,
    }


def setup_of(request: SearchRequest) -> Setup:
    """The common settings of trials. Paths are absolute, as remote workers have other working directories."""
    target = request.base.get("target") or (None if torch.cuda.is_available() else "cpu")
    if target is not None:
        targets.get_target(target)
    base = {**request.base, "model": str(Path(hub.local(request.base["model"])).absolute()), "target": target}
    calibrate = {key: _absolute(value) for key, value in base.get("calibrate", {}).items()}
    base = {key: value for key, value in (base | {"calibrate": calibrate}).items() if value is not None}
    work = request.out.absolute() / WORK
    return Setup(base, _absolute(request.suite), _absolute(request.data), request.seed, request.engine, work)


def _absolute(value: Any) -> Any:
    """The absolute path of an existing file or folder; other values unchanged."""
    return str(Path(value).absolute()) if isinstance(value, str) and Path(value).exists() else value


def _gains(request: SearchRequest, setup: Setup) -> Measured | Modelled:
    """The source of gains: modelled for memory and for other machines, else measured on this machine."""
    target, modelled = setup.base.get("target"), Modelled(setup, request.goal, request.load)
    here = target is None  # whether the target is this machine
    if target is not None:
        machine, has_gpu = targets.get_target(target), torch.cuda.is_available()
        here = machine.capability == torch.cuda.get_device_capability() if has_gpu else machine.is_cpu
    figures = modelled.figures(Candidate())
    is_modelled = figures is not None and figures.of(request.goal) is not None
    if request.goal == "memory" or not here:
        if not is_modelled:
            raise UserError(f"how fast {target} is, is not known; search on such a machine, or with --optimize memory")
        return modelled
    return Measured(modelled if is_modelled else Modelled(setup, request.goal, request.load, STAND_IN), request.data)


def _confirming(request: SearchRequest, setup: Setup, count: int) -> tuple[int, float | None]:
    """Number of questions of the confirmation, and their effective number of images; 0 and None without a confirmation.

    Raises:
        UserError: there are too few to confirm anything, or the search uses some of them as well.
    """
    if count < _LEAST:
        raise UserError(f"{request.data or 'the data'} has {count} questions; a search needs at least {_LEAST}")
    if request.confirm is None:
        return 0, None
    model, file = setup.model, Path(request.confirm)
    suite = tasks.load_suite(request.suite, file, candidate=model, baseline=model, reading=setup.reading)
    subjects = _subjects(suite)
    unchanged = MeanDifference([0.0] * len(subjects), subjects)
    if noninferiority.verdict(unchanged, request.margin, LEVEL) != "pass":
        images = len(set(subjects))
        least = math.ceil(
            images * (noninferiority.samples_needed(unchanged, request.margin, LEVEL) or 0) / len(subjects)
        )
        what = "questions" if images == len(subjects) else "images"
        raise UserError(
            f"{request.confirm} has {len(subjects):,} questions about {images:,} images, and a floor of "
            f"{100 * request.margin:g} points cannot be confirmed with less than {least:,} {what}, even if no answer "
            "changes; give more, or a larger --max-drop"
        )
    both = {name for subject in _subjects(questions_of(setup, None)) for name in subject}
    both &= {name for subject in subjects for name in subject}
    texts = sum(name.startswith(_TEXT) for name in both)
    if len(both) > texts or texts > len(subjects) * _CHANCE:
        what = f"{len(both) - texts} images" if len(both) > texts else f"{texts} questions"
        raise UserError(
            f"{request.confirm} has {what} that {request.data} has, too; confirm on images that the search never sees"
        )
    return len(subjects), unchanged.images


def _subjects(suite: tasks.LoadedSuite) -> list[tuple[str, ...]]:
    """The subject of each question of a suite: hashes of its decoded images, or of its text if it has none."""
    subjects = []
    for task in suite.tasks.values():
        for document in task.eval_docs:
            digests = tuple(image_digest(image).hex() for image in task.doc_to_image(document) or ())
            text = hashlib.sha256(str(task.doc_to_text(document)).encode()).hexdigest()
            subjects.append(digests or (f"{_TEXT}{text}",))
    return subjects


def _placed(request: SearchRequest, setup: Setup, candidate: Candidate, progress: Progress) -> Path:
    """Put the winner's checkpoint and recipe into the search's folder."""
    out = request.out / WINNER
    checkpoint = ensure_checkpoint(setup, candidate, progress)
    with new_folder(out) as folder:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True, copy_function=link_or_copy)
        rename(folder, WINNER)
    keys = {key: value for key, value in setup.base.items() if key not in ("model", "calibrate")} | candidate.keys
    lines = [
        f"# {candidate.name}: the winner of vlmcompress search",
        *(f"{k}: {json.dumps(v)}" for k, v in keys.items()),
    ]
    save_files(request.out, {"recipe": (RECIPE, "\n".join(lines) + "\n")})
    return out
