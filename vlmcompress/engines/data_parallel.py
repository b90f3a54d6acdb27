"""An engine on several workers: each answers a part of the requests with its own engine.

A part includes its images, which the worker writes to a temporary folder; answers are sent back. So only the model must be
shared: its folder has the same path and files on every node, or it came from the Hub, and nodes without it download it.

Requests about the same images stay together, as an engine encodes these once. An engine with fixed batches (`Local.batch`)
gets the same batches as with a single worker, so its answers are the same, bit for bit on identical machines. A part's answers
arrive together when all are done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcompress.engines import Answer, Engine, EngineSettings, Job, Refusals, Request, Run, media_file
from vlmcompress.engines.local import WORKER, Local
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import temporary_folder
from vlmcompress.utils.identity import model_hash
from vlmcompress.utils.workers import Failed, Workers

PARTS = 2  # parts per worker, so that a slow worker delays less
SCHEME = "part:"  # scheme of an image's address within a part
MIXED = ("version", "device_name", "dtype")  # keys of an engine's description that may differ between nodes


@dataclass(frozen=True)
class DataParallel(Engine):
    """The engine `engine` on `workers`, under that engine's name, as the answers are the same."""

    engine: Engine
    workers: Workers

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.engine.name

    @property
    def local(self) -> bool:  # type: ignore[override]
        return self.engine.local

    def _answer(self, job: Job) -> Run:
        """Answer on all workers; `engine["workers"]` is their number. The seconds are elapsed time for all parts."""
        settings, folder = job.settings, Path(job.model).absolute()
        shared = Part(_portable(self.engine), str(folder), hub.identity(folder), model_hash(folder), settings)
        batch = self.engine.batch if isinstance(self.engine, Local) else 0  # requests that it computes together
        batch = settings.max_num_seqs or batch if batch else 0
        parts = divide(job.requests, batch, PARTS * self.workers.size)
        jobs = _Jobs(shared, parts, job.media.resolve())
        answers: dict[str, Answer] = {}
        refusals = Refusals(str(folder), settings.refusals)
        runs: dict[int, Run] = {}
        job.progress(f"{job.label}: {len(jobs)} parts, {self.workers.name}", 0, len(job.requests))
        with contextlib.closing(self.workers.map(answer_part, jobs)) as results:
            for index, run in results:
                if isinstance(run, Failed):
                    raise UserError(run.reason)
                runs[index] = run
                for answer in run.answers.values():
                    if answer.refused:
                        refusals.add(answer.id, answer.refused)
                    answers[answer.id] = answer
                    job.on_answer(answer)
                job.progress(job.label, len(answers), len(job.requests))
        seconds = round(sum(run.seconds for run in runs.values()), 2)
        # The description of the first part, with what differs on other nodes, and all restarts.
        abouts = [runs[index].engine for index in sorted(runs)]
        about: dict[str, Any] = {"workers": min(self.workers.size, len(jobs))}
        if abouts:
            values = {name: sorted({str(each[name]) for each in abouts if name in each}) for name in MIXED}
            mixed = {name: " and ".join(texts) for name, texts in values.items() if texts}
            about = abouts[0] | mixed | {"restarts": sum(each.get("restarts", 0) for each in abouts)} | about
        return Run(answers, about, seconds)


@dataclass(frozen=True)
class Part:
    """A part of the requests, and everything that a worker needs to answer it.

    Attributes:
        model: the model's folder on the machine that started the run.
        hub: its id and commit, if it came from the Hub.
        content: hash of its files.
        images: contents of image and video files; addresses in `requests` are indices into this list.
    """

    engine: Engine
    model: str
    hub: dict[str, str] | None
    content: str
    settings: EngineSettings
    requests: tuple[Request, ...] = ()
    images: tuple[tuple[str, bytes], ...] = ()


class _Jobs(Sequence[Part]):
    """The parts; a part's images are read on access, so that they are not all in memory at once."""

    def __init__(self, shared: Part, parts: Sequence[Sequence[Request]], media: Path):
        self._shared, self._parts, self._media = shared, parts, media

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        images: dict[str, tuple[str, bytes]] = {}

        def packed(address: str) -> str:
            if address not in images:
                try:
                    path = media_file(address, self._media)
                    images[address] = path.suffix, path.read_bytes()
                except ValueError as error:
                    raise UserError(str(error)) from error
                except OSError as error:
                    raise UserError(f"{path} can't be read ({error.strerror})") from error
            return f"{SCHEME}{list(images).index(address)}"

        requests = tuple(_readdressed(request, packed) for request in self._parts[index])
        return dataclasses.replace(self._shared, requests=requests, images=tuple(images.values()))


def divide(requests: Sequence[Request], batch: int, count: int) -> list[list[Request]]:
    """Divide requests into at most `count` parts of about the same size without splitting a unit.

    A unit is a batch of `batch` consecutive requests with equally many images and videos or, if `batch` is 0, all requests
    about the same images and videos.
    """
    groups: dict[Any, list[Request]] = {}
    for request in requests:
        addresses = tuple(part[part["type"]]["url"] for part in request.media())
        media = (request.images(), request.videos()) if batch else addresses
        groups.setdefault(media or request.id, []).append(request)
    cuts = ((group, batch or len(group)) for group in groups.values())
    units = [group[at : at + size] for group, size in cuts for at in range(0, len(group), size)]
    parts: list[list[Request]] = []
    done = 0
    for unit in units:
        # A part begins where the requests so far reach its share: parts differ by less than a unit.
        if not parts or done * count >= len(parts) * len(requests):
            parts.append([])
        parts[-1] += unit
        done += len(unit)
    return parts


def answer_part(part: Part) -> Run:
    """Answer a part of the requests, on the worker's machine.

    Raises:
        UserError: the model is missing here or differs, or the engine fails.
    """
    model = _model_here(part)
    with temporary_folder("part") as folder:
        files = []
        for number, (suffix, content) in enumerate(part.images):
            files.append((folder / f"{number}{suffix}").resolve())
            files[-1].write_bytes(content)

        def here(address: str) -> str:
            return files[int(address.removeprefix(SCHEME))].as_uri()

        requests = [_readdressed(request, here) for request in part.requests]
        engine = part.engine
        if isinstance(engine, Local):  # see `_portable`
            engine = dataclasses.replace(engine, module=WORKER.parent / engine.module)
        return engine.answer(model, requests, media=folder, settings=part.settings)


def _model_here(part: Part) -> Path:
    """The model's folder on this machine."""
    folder, node = Path(part.model), platform.node()
    if part.hub and not folder.is_dir():
        hub.offline_except_ids()
        return hub.local(f"{part.hub['source']}@{part.hub['revision']}")  # the commit identifies the content
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist on node {node}; put the model at the same path on every node")
    if not part.hub and model_hash(folder) != part.content:
        raise UserError(f"{folder} on node {node} differs from the one where the run was started; copy it there again")
    return folder


def _portable(engine: Engine) -> Engine:
    """The engine with its worker file relative to this package, whose path may differ on another node."""
    if not isinstance(engine, Local):
        return engine
    return dataclasses.replace(engine, module=engine.module.relative_to(WORKER.parent))


def _readdressed(request: Request, new: Callable[[str], str]) -> Request:
    """A copy of a request with other addresses of its images and videos."""
    copy = dataclasses.replace(request, messages=json.loads(json.dumps(request.messages)))
    for part in copy.media():
        try:
            part[part["type"]]["url"] = new(part[part["type"]]["url"])
        except UserError as error:
            raise UserError(f"sample '{request.id}': {error}") from error
    return copy
