"""The unfinished work of a long run on disk, so that the same command goes on after an interruption.

`WorkFolder` is the hidden folder `.NAME.work` next to OUT, which is removed once OUT is complete. Its `settings.json` describes
the run that it belongs to: everything that the work depends on (model, data, recipe, versions, threads), under names for
messages. A run with the same settings reuses the work; a run with other settings is refused, unless it is to `restart`.
Files are written under another name, synced and renamed, so that a killed run never damages finished files.

`Journal` is a file to which entries are appended line by line, and which runs with different settings may share: an entry's key
contains everything that it depends on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from vlmcompress.utils import distributed, folders, identity, json_files, locks, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import foreign_errors, note, shortened

RUN = "run"
"""Key of a run's fingerprint, the hash of its settings, in the metadata of a safetensors file and in a note."""
_ANEW = "begin anew with --restart"
_Note = TypedDict("_Note", {"run": str, "data": Any})


class OtherWork(UserError):
    """The work folder holds finished work of a run with other settings."""


class WorkFolder:
    """The finished work of a run: safetensors files and JSON notes, by name. `locked_output` creates it.

    Only one run at a time uses it. As not every file system has locks, each file also holds the fingerprint of its run, and a
    file of another run is refused when it is read. Of several workers, rank 0 creates the folder.

    Attributes:
        out: the final output of the run.
        folder: the folder; `expect` creates it.
        run: fingerprint of the run, set by `begin`.
    """

    def __init__(self, out: Path, restart: bool = False):
        self.out, self.folder, self.run = out, folders.staging_path(out, "work"), ""
        self._restart, self._settings_file = restart, self.folder / "settings.json"
        self._expected: dict[str, Any] = {}

    def expect(self, settings: Mapping[str, Any]) -> None:
        """Record some of this run's settings (name for messages -> JSON data), before its work begins.

        Raises:
            OtherWork: an earlier run with a different setting left work here.
        """
        with distributed.shared_errors():
            if not distributed.is_main():
                return
            with folders.user_errors(self.folder):
                if self.folder.is_symlink():
                    raise UserError(f"{self.folder} is a link, and unfinished work goes nowhere else; remove it")
                if self._restart and self.folder.exists():
                    shutil.rmtree(self.folder)
                # Compared as JSON, since that is how they were stored: a tuple equals its list.
                self._restart, before = False, {} if self._is_empty() else self._settings()
                self._expected |= json.loads(json.dumps(settings, default=str))
                for name, value in self._expected.items():
                    if name in before and before[name] != value:
                        name, *both = _difference(name, before[name], value)
                        was, new = (shortened(text if isinstance(text, str) else json.dumps(text), 80) for text in both)
                        raise OtherWork(
                            f"{self.folder} keeps the work of an interrupted run with {name} {was}, this one has {new}; give "
                            f"the same, or {_ANEW}"
                        )
                self.folder.mkdir(parents=True, exist_ok=True)
                with self._replaced(self._settings_file) as part:
                    part.write_text(json.dumps(before | self._expected))

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Begin the work, or resume it, once all `settings` are known. Raises as `expect` does."""
        self.expect(settings)
        self.run = self._fingerprint()
        if distributed.is_main() and any(self.folder.glob("*.safetensors")):
            note(f"going on with the finished work in {self.folder}; --restart begins anew")

    def path(self, name: str) -> Path:
        """The safetensors file of a name, finished or not."""
        return self.folder / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        """Whether there is a safetensors file of this name."""
        return self.path(name).exists()

    def write(self, name: str, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
        """Write a safetensors file, replacing an older one; it is on disk when this returns.

        Raises:
            UserError: the file cannot be written, or another run has taken the folder.
        """
        # Read anew at each write: without locks another run may have begun here with other settings meanwhile.
        self._require_same_settings(self._fingerprint(), self._settings_file)
        with self._replaced(self.path(name)) as part:
            folders.save_tensors(part, tensors, {**(metadata or {}), RUN: self.run})

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """Open a file of `write` with safetensors. Raises `UserError` if it belongs to another run or cannot be read."""
        from safetensors import safe_open

        path = self.path(name)
        with foreign_errors(f"{path} is damaged", f"; {_ANEW}"), safe_open(path, "pt") as file:
            self._require_same_settings((file.metadata() or {}).get(RUN), path)
            yield file

    def write_note(self, name: str, data: Any) -> None:
        """Write small JSON data under a name; the file is on disk when this returns."""
        self._require_same_settings(self._fingerprint(), self._settings_file)
        with self._replaced(self.folder / f"{name}.json") as part:
            part.write_text(json.dumps({RUN: self.run, "data": data}))

    def read_note(self, name: str, kind: Any = Any) -> Any:
        """The JSON data that `write_note` wrote under a name, or None.

        Raises:
            UserError: the note belongs to another run, or is not of type `kind` (see `schema`).
        """
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        content = schema.read_typed(_Note, path, _ANEW)
        self._require_same_settings(content[RUN], path)
        schema.require_value(kind, content["data"], str(path), _ANEW)
        return content["data"]

    def remove(self, *, empty: bool = False) -> None:
        """Delete the folder, unless another run has taken it. `empty`: only if it holds no finished work."""
        if self._settings() == self._expected and (self._is_empty() or not empty):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _is_empty(self) -> bool:
        """Whether there is no finished work: no folder, or only settings in it."""
        return not self.folder.is_dir() or all(path == self._settings_file for path in self.folder.iterdir())

    def _settings(self) -> dict[str, Any]:
        """The settings in the folder; empty if there are none."""
        return schema.read_typed(dict[str, Any], self._settings_file, _ANEW) if self._settings_file.exists() else {}

    def _fingerprint(self) -> str:
        return identity.json_digest(self._settings())

    @contextlib.contextmanager
    def _replaced(self, path: Path) -> Iterator[Path]:
        """Yield a temporary path to write to; at the end of the context that file is synced and replaces `path`."""
        part = path.with_name(f"{path.name}.part")
        with folders.user_errors(path):
            yield part
            folders.sync_file(part)
            part.rename(path)

    def _require_same_settings(self, run: str | None, path: Path) -> None:
        if run != self.run:
            raise UserError(
                f"{path} is of another run: two worked in {self.folder} at once, on a file system without locks; end all of "
                "them, then start one again, with --restart"
            )


def _difference(name: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """The first difference of two settings: its dotted name, and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                return _difference(f"{name}.{key}", before.get(key), now.get(key))
    return name, before, now


@contextlib.contextmanager
def locked_output(
    out: Path, check: Callable[[], object] = lambda: None, *, restart: bool = False
) -> Iterator[WorkFolder]:
    """Lock OUT and its work folder for this run within the context.

    Of several workers, rank 0 takes the lock for all; if another run holds it, all workers raise in
    `distributed.process_group`.

    Args:
        out: folder or file that the run writes.
        check: raises `UserError` for an OUT that must not be written. It is called before the lock is taken and again under
            the lock, as another run may have changed OUT in between.
        restart: delete the work that an interrupted run left.

    Raises:
        UserError: another run holds OUT, or `check` refuses it. A `WriteError` from within names the folder of finished work.
    """
    # Before the lock, as most wrong calls end here, and waiting for another run would only delay the message.
    check()
    work = WorkFolder(out, restart)
    with contextlib.ExitStack() as stack:
        if distributed.is_main():
            try:
                with folders.user_errors(out):
                    stack.enter_context(folders.parents(out))
                    stack.enter_context(locks.held(folders.staging_path(out, "lock"), f"writing {out}"))
                check()
            except UserError as error:
                with distributed.process_group(str(error)):
                    raise
        try:
            yield work
        except folders.WriteError as error:
            if work._is_empty():
                raise
            kept = f"finished work is kept in {work.folder}: the same command goes on"
            raise folders.WriteError(f"{error}; {kept}") from error
        finally:
            if distributed.is_main():
                work.remove(empty=True)


def locked_folder(
    source: Path, out: Path, *, overwrite: bool, mark: str, restart: bool = False
) -> contextlib.AbstractContextManager[WorkFolder]:
    """`locked_output` with `folders.require_out` as its check, for a run that writes the folder OUT."""
    return locked_output(
        out, functools.partial(folders.require_out, source, out, overwrite=overwrite, mark=mark), restart=restart
    )


class Journal:
    """JSON lines `{"key", "entry"}` in a file, each synced before the next; see `open_journal`."""

    def __init__(self, path: Path, descriptor: int):
        self.path, self._file = path, descriptor
        self._entries: dict[str, Any] = {}
        with open(self._file, "rb", closefd=False) as file:
            content = file.read()
        # A line counts once its line break is written: what follows the last one is of a run that was killed.
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.ftruncate(self._file, end)  # an incomplete last line
        for number, line in enumerate(content[:end].splitlines(), 1):
            try:
                row = json_files.parse_json(line)
                self._entries[row["key"]] = row["entry"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path} line {number} is damaged; {_ANEW}") from error

    def __len__(self) -> int:
        return len(self._entries)

    def read(self, key: str) -> Any:
        """The last entry of a key; None if there is none."""
        return self._entries.get(key)

    def write(self, key: str, entry: Any) -> None:
        """Append a line and wait until it is on disk.

        Raises:
            UserError: it can't be written, e.g. because the disk is full. All earlier lines stay readable.
        """
        line = json.dumps({"key": key, "entry": entry}).encode() + b"\n"
        start = os.lseek(self._file, 0, os.SEEK_END)
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            # Half a line would make the journal look damaged to the next run.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, start)
            raise folders.WriteError(
                f"can't write {self.path} ({error.strerror}); make room and run again, "
                f"the {len(self)} entries written so far are kept"
            ) from error
        self._entries[key] = entry


@contextlib.contextmanager
def open_journal(path: Path, *, restart: bool = False) -> Iterator[Journal]:
    """Open or create a journal, for one process at a time. `restart`: delete its entries.

    Raises:
        UserError: it can't be opened, is damaged, or another run is using it.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locks.held(folders.staging_path(path, "lock"), f"using {path}"))
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if restart else 0), 0o644)
        except OSError as error:
            raise folders.WriteError(f"can't open {path} ({error.strerror}); choose another folder") from error
        stack.callback(os.close, descriptor)
        yield Journal(path, descriptor)
