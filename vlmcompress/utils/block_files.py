"""The finished decoder blocks of a run that may be interrupted, one safetensors file for each, so that it can be resumed.

The folder is a hidden sibling of OUT. It belongs to one *fingerprint*, a hash of all that its contents depend on (source
weights, recipe, calibration data, versions, threads); a run with another fingerprint removes them. A file is written under
another name, fsynced and renamed, so that a run killed at any moment leaves only finished blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from typing_extensions import TypedDict

from vlmcompress.utils import distributed, folders, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import foreign_errors

RUN = "run"
"""Key of the fingerprint, in the metadata of a safetensors file and in a note."""


_ANEW = "start again without --resume"
_Note = TypedDict("_Note", {"run": str, "data": Any})


class BlockFiles:
    """A folder with a safetensors file for each finished decoder block, and notes in JSON.

    One run at a time uses it (`folders.claimed`). As not every file system has locks, each file also holds the fingerprint of
    its run: a file that another run put here is refused when it is read.

    Args:
        folder: where the files are kept; it is created.
        fingerprint: hash of all that the files' contents depend on.
        resume: keep what an earlier run with the same fingerprint left; otherwise start empty.
    """

    def __init__(self, folder: Path, fingerprint: str, resume: bool):
        self.folder, self._mark = folder, folder / "fingerprint"
        if not distributed.is_main():  # the first worker makes it
            return
        self.run = fingerprint
        with folders.user_errors(folder):
            if folder.exists() and not (resume and self._marked() == fingerprint):
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._mark.write_text(fingerprint)

    @cached_property
    def run(self) -> str:
        """The fingerprint. The first worker writes it to the folder; the others read it there, after a barrier."""
        return self._marked()

    def path(self, layer: int) -> Path:
        """The file of a block, finished or not."""
        return self.folder / block_file(layer)

    def has(self, layer: int) -> bool:
        """Whether the block is finished."""
        return self.path(layer).exists()

    def finished(self) -> int:
        """How many blocks are finished."""
        return sum(1 for _ in self.folder.glob("layer-*.safetensors"))

    def write(self, path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
        """Write a safetensors file atomically, replacing an older one; it is on disk when this returns.

        Raises:
            UserError: it cannot be written, or another run has taken the folder.
        """
        with self._replaced(path) as part:
            try:
                save_file(tensors, part, (metadata or {}) | {RUN: self.run})
            except SafetensorError as error:  # carries an OSError only as text
                if number := re.search(r"os error (\d+)", str(error)):
                    raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
                raise

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[Any]:
        """Open a file that `write` wrote, as safetensors does. UserError: it is another run's, or cannot be read."""
        with foreign_errors(f"{path} is damaged", f"; {_ANEW}"), safe_open(path, "pt") as file:
            self._refuse_others((file.metadata() or {}).get(RUN), path)
            yield file

    def note(self, name: str, data: Any) -> None:
        """Write small JSON data under a name; they are on disk when this returns."""
        with self._replaced(self.folder / f"{name}.json") as part:
            part.write_text(json.dumps({RUN: self.run, "data": data}))

    @contextlib.contextmanager
    def _replaced(self, path: Path) -> Iterator[Path]:
        """A path to write to in the context; then that file is synced and takes the place of `path`."""
        self._refuse_others(self._marked(), self._mark)
        part = path.with_suffix(".part")
        with folders.user_errors(path):
            yield part
            folders.sync_file(part)
            part.rename(path)

    def noted(self, name: str, kind: Any = Any) -> Any:
        """The JSON data that `note` wrote under a name; None: there are none.

        Raises:
            UserError: they are another run's, or not of `kind` (see `schema`).
        """
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        note = schema.read(_Note, path, _ANEW)
        self._refuse_others(note[RUN], path)
        schema.check(kind, note["data"], str(path), _ANEW)
        return note["data"]

    def remove(self) -> None:
        """Delete the folder, unless another run has taken it; called once OUT is whole."""
        if self._marked() == self.run:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _marked(self) -> str:
        """The fingerprint in the folder; "" where there is none."""
        try:
            return self._mark.read_text()
        except OSError:
            return ""

    def _refuse_others(self, run: str | None, path: Path) -> None:
        if run != self.run:
            raise UserError(
                f"{path} is of another run: two worked in {self.folder} at once, on a file system without locks; end all of "
                "them, then start one again, without --resume"
            )


def block_file(layer: int) -> str:
    """Name of the file of a block."""
    return f"layer-{layer:04d}.safetensors"
