"""A search from a request to a folder: checks, the race, and the winner's checkpoint in its place."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vlmcompress import targets
from vlmcompress.checkpoint.write import rename
from vlmcompress.common import hub, workers
from vlmcompress.common.folders import new_folder, save
from vlmcompress.common.identity import source_identity
from vlmcompress.common.progress import Progress
from vlmcompress.common.text import duration
from vlmcompress.errors import UserError
from vlmcompress.evaluation import noninferiority, tasks
from vlmcompress.evaluation.compare import LEVEL
from vlmcompress.evaluation.paired import MeanDifference
from vlmcompress.search import outcome, space
from vlmcompress.search.book import QUESTIONS, WORK, open_book
from vlmcompress.search.candidate import Candidate
from vlmcompress.search.race import Rules
from vlmcompress.search.run import SHARE, Found, Live, original, search
from vlmcompress.search.speed import STAND_IN, Goal, Load, Measured, Modelled
from vlmcompress.search.trial import Setup, made, questions_of

WINNER, RECIPE = "winner", "recipe.yaml"
__all__ = ["QUESTIONS", "WORK", "Request", "Searched", "find", "setup_of"]
_LEAST = 30
"""Questions without which nothing can be said."""
_CHANCE = 0.1
"""Share of questions without image, such as sums, that may be in both data by chance."""
_TEXT = "text:"


@dataclass(frozen=True)
class Request:
    """What a search is asked for.

    Attributes:
        base: recipe keys that all candidates have: `model`, `calibrate`, `seed`, and `target`, None for this machine.
        out: folder of the search.
        data, suite, limit: the questions, as `vlmcompress eval` takes them.
        confirm: other questions for the winner; None: it is not confirmed.
        margin: the allowed loss, as a share.
        speed: `measured`, `modelled`, or empty for what can be done.
        budget: seconds; None: no limit.
        space: file of the space; None: the usual one, `small` or not, with trained models if `recover`.
    """

    base: Mapping[str, Any]
    out: Path
    data: str | None
    suite: str | None = None
    confirm: str | None = None
    limit: int | None = None
    margin: float = 0.01
    goal: Goal = "throughput"
    speed: str = ""
    load: Load = field(default_factory=Load)
    budget: float | None = None
    engine: str = "vllm"
    ray: str | None = None
    space: str | None = None
    recover: bool = False
    small: bool = False

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return int(self.base.get("seed", 0))


@dataclass(frozen=True)
class Searched:
    """A search's end: what it found, the same as data, the winner's folder (None without one), and the questions' setup."""

    found: Found
    data: dict[str, Any]
    winner: Path | None
    setup: Setup


def find(asked: Request, progress: Progress) -> Searched:
    """Run a search, or go on with one that was interrupted.

    Raises:
        UserError: bad input, or the original cannot be asked. The folder keeps what was found until then.
    """
    setup = setup_of(asked)
    base = setup.base
    gains = _gains(asked, setup)
    count = len(questions_of(setup, asked.limit))
    confirming, images = _confirming(asked, setup, count)
    known = source_identity(setup.model)
    about = {
        "model": known,
        "data": asked.data,
        "suite": asked.suite,
        "calibration": base.get("calibrate", {}),
        "seed": asked.seed,
        "engine": asked.engine,
        "questions": count,
    }
    usual = {"recover": asked.recover, "small": asked.small}
    where = space.read(asked.space, base) if asked.space else space.usual(base, **usual)
    with open_book(asked.out, json.loads(json.dumps(about, default=str)), asked.budget) as book:
        with closing(workers.of(asked.ray)) as crew:
            before = original(setup, count, crew, book, progress)
            if book.left <= 0:
                raise UserError(
                    f"--max-time is spent: asking the original took {duration(book.spent)}; give a longer one, which goes on "
                    "from here, or fewer questions (--limit)"
                )
            reserve = 2.4 * confirming * (book.note("seconds") or 0.0)  # the original, the winner, and some more
            live = Live(setup, crew, book, gains, before, progress, max(reserve, SHARE * (asked.budget or 0.0)))
            found = search(where, live, Rules(asked.margin, count, images))
        rate = gains.rate(found.winner.candidate) if found.winner else None
        data = outcome.plain(found, _described(asked, base, gains), where.left_out, rate)
        winner = _placed(asked, setup, found, progress)
        book.finish()
    return Searched(found, data, winner, setup)


def setup_of(asked: Request) -> Setup:
    """What the trials share. Paths are absolute, as workers elsewhere have other working directories."""
    base = {**asked.base, "model": str(Path(hub.local(asked.base["model"])).absolute()), "target": _target(asked)}
    calibrate = {key: _absolute(value) for key, value in base.get("calibrate", {}).items()}
    base = {key: value for key, value in (base | {"calibrate": calibrate}).items() if value is not None}
    work = asked.out.absolute() / WORK
    return Setup(base, _absolute(asked.suite), _absolute(asked.data), asked.seed, asked.engine, work)


def _absolute(value: Any) -> Any:
    """The absolute path of a file or folder that is there; anything else as it is."""
    return str(Path(value).absolute()) if isinstance(value, str) and Path(value).exists() else value


def _described(asked: Request, base: Mapping[str, Any], gains: Measured | Modelled) -> dict[str, Any]:
    return {
        "model": hub.facts(base["model"])["source"],
        "target": base.get("target"),
        "max_drop": asked.margin,
        "optimize": asked.goal,
        "gains": gains.how,
        "seed": asked.seed,
        "engine": asked.engine,
    }


def _target(asked: Request) -> str | None:
    """The target; where none is named, the CPU on a machine without a GPU."""
    named = asked.base.get("target")
    if named is not None:
        targets.get(named)
        return str(named)
    return None if torch.cuda.is_available() else "cpu"


def _here(name: str | None) -> bool:
    """Whether a target is this machine."""
    if name is None:
        return True
    target = targets.get(name)
    if not torch.cuda.is_available():
        return target.is_cpu
    return target.capability == torch.cuda.get_device_capability()


def _gains(asked: Request, setup: Setup) -> Measured | Modelled:
    """What says the gains: shapes for memory and for other machines, else this machine."""
    target, modelled = setup.base.get("target"), Modelled(setup, asked.goal, asked.load)
    figures = modelled.figures(Candidate())
    known = figures is not None and figures.of(asked.goal) is not None
    if asked.goal == "memory" or asked.speed == "modelled" or (not asked.speed and not _here(target)):
        if not known:
            raise UserError(f"--speed modelled: how fast {target} is, is not known; use --speed measured there")
        return modelled
    return Measured(modelled if known else Modelled(setup, asked.goal, asked.load, STAND_IN), asked.data)


def _confirming(asked: Request, setup: Setup, count: int) -> tuple[int, float | None]:
    """Number of questions of the confirmation, and their effective number of images; 0 and None without a confirmation.

    Raises:
        UserError: too few of them to confirm anything, or some that the search asks, too.
    """
    if count < _LEAST:
        raise UserError(f"{asked.data or 'the data'} has {count} questions; a search needs at least {_LEAST}")
    if asked.confirm is None:
        return 0, None
    model, file = setup.model, Path(asked.confirm)
    suite = tasks.load_suite(asked.suite, file, candidate=model, baseline=model)
    subjects = _subjects(suite)
    unchanged = MeanDifference([0.0] * len(subjects), subjects)
    if noninferiority.verdict(unchanged, asked.margin, LEVEL) != "pass":
        images = len(set(subjects))
        least = math.ceil(images * (noninferiority.needed(unchanged, asked.margin, LEVEL) or 0) / len(subjects))
        what = "questions" if images == len(subjects) else "images"
        raise UserError(
            f"{asked.confirm} has {len(subjects):,} questions about {images:,} images, and a floor of "
            f"{100 * asked.margin:g} points cannot be confirmed with less than {least:,} {what}, even if no answer "
            "changes; give more, or a larger --max-drop"
        )
    both = {name for subject in _subjects(questions_of(setup, None)) for name in subject}
    both &= {name for subject in subjects for name in subject}
    texts = sum(name.startswith(_TEXT) for name in both)
    if len(both) > texts or texts > len(subjects) * _CHANCE:
        what = f"{len(both) - texts} images" if len(both) > texts else f"{texts} questions"
        raise UserError(
            f"{asked.confirm} has {what} that {asked.data} has, too; confirm on images that the search never sees"
        )
    return len(subjects), unchanged.images


def _subjects(suite: tasks.LoadedSuite) -> list[tuple[str, ...]]:
    """What each question of a suite is about: hashes of its images as they are when decoded, or of its text if it has none."""
    subjects = []
    for task in suite.tasks.values():
        for document in task.eval_docs:
            shown = tuple(hashlib.sha256(image.tobytes()).hexdigest() for image in task.doc_to_image(document) or ())
            text = hashlib.sha256(str(task.doc_to_text(document)).encode()).hexdigest()
            subjects.append(shown or (f"{_TEXT}{text}",))
    return subjects


def _placed(asked: Request, setup: Setup, found: Found, progress: Progress) -> Path | None:
    """Put the winner's checkpoint and recipe into the search's folder."""
    if found.winner is None:
        return None
    candidate = found.winner.candidate
    out = asked.out / WINNER
    checkpoint = made(setup, candidate, progress)
    with new_folder(out) as folder:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True, copy_function=_linked)
        rename(folder, WINNER)
    keys = {key: value for key, value in setup.base.items() if key not in ("model", "calibrate")} | candidate.keys
    head = f"# {candidate.name}: found by vlmcompress search\n"
    if candidate.recover:
        head += (
            "# The model was trained behind the reducer first: vlmcompress recover MODEL --reduce ... -o RECOVERED\n"
        )
    text = head + "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
    save(asked.out, {"recipe": (RECIPE, text)})
    return out


def _linked(source: str, target: str) -> None:
    """Link a file into another folder, or copy it where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
