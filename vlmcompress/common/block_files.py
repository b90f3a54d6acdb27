"""Files that keep the finished decoder blocks of a run that may be interrupted: one safetensors file for each.

The folder is a hidden sibling of OUT. It belongs to one *fingerprint* (source weights, recipe, calibration data,
versions, threads); with another fingerprint its contents are worthless and are removed. Files appear whole (written
aside, fsynced, renamed), so that a run killed at any moment leaves only finished blocks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vlmcompress.common import folders, team


class BlockFiles:
    """A folder with a safetensors file for each finished decoder block.

    Args:
        folder: where the files are kept; it is created.
        fingerprint: hash of all that the files' contents depend on.
        resume: keep what an earlier run with the same fingerprint left; otherwise start empty.
    """

    def __init__(self, folder: Path, fingerprint: str, resume: bool):
        self.folder = folder
        if not team.first():  # the first worker makes it, and writes to it
            return
        mark = folder / "fingerprint"
        with folders.user_errors(folder):
            if folder.exists() and not (resume and mark.exists() and mark.read_text() == fingerprint):
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(fingerprint)

    def path(self, layer: int) -> Path:
        """The file of a block, finished or not."""
        return self.folder / block_file(layer)

    def has(self, layer: int) -> bool:
        """Whether the block is finished."""
        return self.path(layer).exists()

    def finished(self) -> int:
        """How many blocks are finished."""
        return sum(1 for _ in self.folder.glob("layer-*.safetensors"))

    def write(self, layer: int, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
        """Write a block's tensors to its file, which is on disk when this returns."""
        write_whole(self.path(layer), tensors, metadata)

    def note(self, name: str, data: Any) -> None:
        """Write small JSON data under a name; they are on disk when this returns."""
        path = self.folder / f"{name}.json"
        aside = path.with_suffix(".part")
        with folders.user_errors(path):
            aside.write_text(json.dumps(data))
            folders.sync_file(aside)
            aside.rename(path)

    def noted(self, name: str) -> Any:
        """The JSON data that `note` wrote under a name; None where there are none."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def remove(self) -> None:
        """Delete the folder; called once OUT is whole."""
        shutil.rmtree(self.folder, ignore_errors=True)


def block_file(layer: int) -> str:
    """Name of the file of a block."""
    return f"layer-{layer:04d}.safetensors"


def write_whole(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that appears whole, in the place of an older one; it is on disk when this returns."""
    aside = path.with_suffix(".part")
    with folders.user_errors(path):
        try:
            save_file(tensors, aside, metadata)
        except SafetensorError as error:  # carries an OSError only as text
            if number := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise
        folders.sync_file(aside)
        aside.rename(path)
