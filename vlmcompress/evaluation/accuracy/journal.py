"""A journal of answers on disk, written as they come, so that a killed run can go on.

An append-only file of JSON lines, each synced before the next. A line's key is a SHA-256 of everything that decides the
answer: the checkpoint's files, the engine, the messages with their images' contents, and the limits. Stop strings are
not in it: they are cut from the answer afterwards. One journal serves any number of checkpoints and suites.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vlmcompress.engines import Answer, Request, Settings
from vlmcompress.utils import folders, json_files, locks
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.identity import model_files, unchanged
from vlmcompress.utils.schema import problem

_ANSWER = TypeAdapter(Answer)
SETTINGS = ("max_model_len", "dtype", "logprobs")  # beside max_tokens, those that an answer depends on


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
    stats = json.dumps(unchanged(model_files(folder)))
    return Identity(hashlib.sha256(stats.encode()).hexdigest(), engine)


def key(identity: Identity, request: Request, settings: Settings) -> str:
    """The key that an answer is filed under. Images are named by content (`lm.write_image`), so their folder is left out."""
    limits = {name: getattr(settings, name) for name in SETTINGS}
    limits["max_tokens"] = settings.max_tokens if request.max_tokens is None else request.max_tokens
    what = [asdict(identity), without_folders(request.messages), limits]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def without_folders(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cut the `file:` addresses of images in messages to the file's name, which is a hash of its content."""
    return json.loads(json.dumps(messages), object_hook=_without_folder)


def _without_folder(value: dict[str, Any]) -> dict[str, Any]:
    if isinstance(value.get("url"), str) and value["url"].startswith("file:"):
        return value | {"url": value["url"].rpartition("/")[2]}
    return value


class Journal:
    """A journal file, open for one process at a time; use `open_journal`."""

    def __init__(self, path: Path, descriptor: int):
        self.path, self._file = path, descriptor
        self._entries: dict[str, Any] = {}
        self._read()

    def __len__(self) -> int:
        return len(self._entries)

    def answered(self, keys: Mapping[str, str]) -> dict[str, Answer]:
        """id -> answer, for those of `keys` (id -> key) that are in the journal. UserError: an entry is no answer."""
        entries = {identity: self._entries[key] for identity, key in keys.items() if key in self._entries}
        try:
            return {
                identity: replace(_ANSWER.validate_python(entry), id=identity) for identity, entry in entries.items()
            }
        except ValidationError as error:
            raise UserError(f"{self.path}: an answer's {problem(error)}; remove the file and run again") from error

    def add(self, key: str, answer: Answer) -> None:
        self.write(key, asdict(answer))

    def read(self, key: str) -> Any:
        """The last entry that was written under a key; None if there is none."""
        return self._entries.get(key)

    def write(self, key: str, entry: Any) -> None:
        """Append a line and wait until it is on disk.

        Raises:
            UserError: it can't be written, e.g. as the disk is full. All earlier lines stay readable.
        """
        line = json.dumps({"key": key, "entry": entry}).encode() + b"\n"
        start = os.lseek(self._file, 0, os.SEEK_END)
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, start)
            raise UserError(
                f"can't write {self.path} ({error.strerror}); make room and run again, "
                f"the {len(self)} entries written so far are kept"
            ) from error
        self._entries[key] = entry

    def _read(self) -> None:
        """Read all whole lines, and cut off a last one that was torn."""
        with open(self._file, "rb", closefd=False) as file:
            content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.ftruncate(self._file, end)
        for number, line in enumerate(content[:end].splitlines(), 1):
            try:
                row = json_files.parse(line)
                self._entries[row["key"]] = row["entry"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path} line {number} is damaged; remove the file and run again") from error


@contextlib.contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """Open or create a journal.

    Raises:
        UserError: it can't be opened, is damaged, or another run is using it.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locks.held(folders.beside(path, "lock")))
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except locks.Held as error:
            raise UserError(
                f"another run, {error.owner}, is using {path}; wait for it or choose another folder"
            ) from None
        except OSError as error:
            raise UserError(f"can't open {path} ({error.strerror}); choose another folder") from error
        stack.callback(os.close, descriptor)
        yield Journal(path, descriptor)
