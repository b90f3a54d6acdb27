"""What is said in results of a checkpoint and of this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vlmcompress import __version__
from vlmcompress.checkpoint import manifest, reducer_block
from vlmcompress.errors import UserError
from vlmcompress.models._read import read_json
from vlmcompress.results import Side


def side(model: str | Path, engine: Mapping[str, Any]) -> Side:
    """A checkpoint folder, or a name that a server knows, of which there is only the name to tell."""
    path = Path(model)
    if not path.is_dir():
        return Side(name=str(model), path=str(model), engine=dict(engine))
    made = manifest.read(path) if (path / manifest.MANIFEST).is_file() else {}
    own, attached = _carried(path), engine.get("reduce") or ""
    return Side(
        name=path.resolve().name + (f" with {attached}" if attached != own and attached else ""),
        path=str(path),
        weight_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
        scheme=(made.get("recipe") or {}).get("scheme") or "",
        reducer=attached or own,
        layer_errors=made.get("errors") or {},
        engine=dict(engine),
    )


def _carried(path: Path) -> str:
    """The reducer that a checkpoint carries, as the command line has it; "" for none. UserError: its block is not right."""
    file = path / "config.json"
    try:
        found = reducer_block.read(read_json(file, "config")) if file.is_file() else None
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return str(found.reducer) if found else ""


def checkpoint(model: str | Path) -> Path:
    """The folder, if a checkpoint is there.

    Raises:
        UserError: there is none, or its config.json is not right.
    """
    path = Path(model)
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint folder")
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: not a checkpoint, it has no config.json")
    _carried(path)
    return path


def origin() -> dict[str, Any]:
    """When, with what version and on what machine: the head of a `Results`."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
    }
