"""Rotate a model before a run looks at it: everything behind sees a plain model, that of a hidden folder beside OUT."""

from __future__ import annotations

import shutil
from pathlib import Path

from vlmcompress.calibration.devices import accelerator
from vlmcompress.checkpoint import rotate
from vlmcompress.common import distributed, folders
from vlmcompress.common.progress import Progress, phase
from vlmcompress.errors import UserError
from vlmcompress.models import Source
from vlmcompress.planning.survey import rotation_problems
from vlmcompress.recipe import Recipe


def made(recipe: Recipe, progress: Progress) -> Source:
    """Make the rotated model of a recipe that asks for one; one that an interrupted run left is taken as it is.

    Raises:
        UserError: the model can't be rotated, or there is no room for it beside OUT.
    """
    assert recipe.out is not None and recipe.rotate is not None
    source = Source.of(recipe.model)
    if found := rotation_problems(recipe, source):
        raise UserError(found[0])
    folder = _folder(recipe.out)
    if distributed.is_main():
        with phase("rotating"):
            rotate.write(
                source,
                folder,
                rotate.Rotations(recipe.rotate, recipe.seed),
                device=accelerator() or "cpu",
                progress=lambda done, total: progress("rotating", done, total),
            )
    distributed.barrier()
    return Source.of(folder)


def clean(out: Path) -> None:
    """Remove the rotated model of a run that is done."""
    shutil.rmtree(_folder(out), ignore_errors=True)


def _folder(out: Path) -> Path:
    return folders.beside(out, "rotated")
