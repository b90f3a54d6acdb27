"""Describe a checkpoint as a side of a comparison, and this machine, for a `results.json`."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vlmcompress import __version__, models
from vlmcompress.evaluation.results import FILE, Calibration, Provenance, Side
from vlmcompress.export import card, manifest, readers
from vlmcompress.models import read_json, shards
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.resize import Resize
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import note


def side(model: str | Path, engine: Mapping[str, Any]) -> Side:
    """Describe a checkpoint from its folder; for a model on a server only its name is known."""
    path = Path(model)
    if not path.is_dir():
        return Side(name=str(model), path=str(model), engine=dict(engine))
    try:
        record = manifest.read_manifest(path)
    except UserError:  # unreadable: an error here would cost hours of measurement
        record = {}
    provenance = _provenance(path, record) if record else None
    reducer, attached = _reducer(path), engine.get("reduce") or ""
    return Side(
        name=hub.source_facts(path)["source"] + (f" with {attached}" if attached != reducer and attached else ""),
        path=hub.display_path(path),
        weight_bytes=_weight_bytes(path, record),
        scheme=provenance.scheme if provenance else "",
        reducer=attached or reducer,
        made=provenance,
        layer_errors=record.get("errors", {}),
        engine=dict(engine),
    )


def _weight_bytes(path: Path, record: Mapping[str, Any]) -> int:
    """Bytes of a checkpoint's tensors: its safetensors files without headers; without such files, the manifest's value, or
    0."""
    try:
        count = 0
        for file in shards(path):
            with file.open("rb") as stream:
                count += file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")
    except (UserError, OSError):  # GGUF, OpenVINO's files, only pickles, or a file is missing: the engine reports that
        return record["size"]["weights_after"] if record else 0
    return max(count, 0)


def _provenance(path: Path, record: Mapping[str, Any]) -> Provenance | None:
    """The provenance of a checkpoint from its manifest, and its number formats from `config.json`.

    None if this version cannot read them.
    """
    recipe, data = record["recipe"], record["calibration"]
    try:
        quantization = read_json(path / "config.json", "config").get("quantization_config") or {}
        formats = [
            f"weights {card.number_format(group['weights'])}, activations {card.number_format(group['input_activations'])}"
            for group in (quantization.get("config_groups") or {}).values()
        ] or [card.other_format(quantization)] * bool(quantization)
        text = (data or {}).get("text") or {}
        return Provenance(
            source=record["model"]["source"],
            family=record["model"]["family"],
            scheme=recipe.get("scheme") or "",
            options=recipe.get("options") or {},
            formats=list(dict.fromkeys(formats)),
            bits=record["allocation"]["bits"] if "allocation" in record else None,
            vision=recipe.get("vision") or "",
            kv_cache=recipe.get("kv_cache") or "",
            skip=recipe.get("skip") or [],
            resize=str(Resize(**recipe["resize"])) if recipe.get("resize") else "",
            reducer=_reducer(path),
            calibration=Calibration(
                source=data["source"],
                samples=data["samples"],
                images=data.get("images"),
                tokens=data.get("tokens") or {},
                text=text.get("samples", 0),
                text_source=text.get("source", ""),
                seed=data.get("seed"),
                prefix=data.get("prefix"),
            )
            if data
            else None,
            seed=record["seed"],
            warnings=record["warnings"],
            versions=record["created_by"],
        )
    except (KeyError, TypeError, AttributeError, ValidationError):
        return None


def calibration_images(model: str | Path) -> frozenset[str] | None:
    """The hashes of the images that a checkpoint was calibrated on (`models.data.provenance`), empty where it was on none; None
    where that is not known: there is no manifest of ours, or no hashes in it."""
    try:
        record = manifest.read_manifest(Path(model)) if Path(model).is_dir() else {}
    except UserError:
        return None
    if not record:
        return None
    data = record["calibration"]
    hashes = data.get("image_hashes") if data else []
    return None if hashes is None else frozenset(hashes)


def _reducer(path: Path) -> str:
    """The reducer in a checkpoint's config.json, in the form of the command line; "" for none.

    Raises:
        UserError: its block is invalid.
    """
    file = path / "config.json"
    try:
        block = reducer_block.read_reducer(read_json(file, "config")) if file.is_file() else None
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return str(block.reducer) if block else ""


def folder(model: str | Path, *engines: str) -> Path:
    """Return the folder of a checkpoint, after checking that one is there.

    Args:
        engines: names in `eval` of engines, of which at least one must load it; empty: not checked.

    Raises:
        UserError: there is no checkpoint, its config.json is invalid, or no given engine loads it.
    """
    path = Path(model)
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint folder")
    models.require_no_adapter(path)
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: not a checkpoint, it has no config.json")
    _reducer(path)
    _note_asides(path)
    if engines:
        readers.require_readable(path, engines)
    return path


def is_report(model: str | Path) -> bool:
    """Whether a path is an earlier report, a folder or its `results.json`, and not a checkpoint."""
    path = Path(model)
    return path.suffix == ".json" or ((path / FILE).is_file() and not (path / "config.json").is_file())


def require_side(model: str | Path, engine: str) -> None:
    """Check a path as `folder` does, before anything slow is imported; not an id, a report, or what a server calls a model."""
    if not engine.startswith("openai:") and hub.parse_repository(model) is None and not is_report(model):
        folder(model)


@functools.cache
def _note_asides(path: Path) -> None:
    """Print a note, once, about weight files in a checkpoint's folder that do not belong to it."""
    for line in models.asides(path):
        note(f"{path}: {line}")


def origin() -> dict[str, Any]:
    """Date, version and machine, the first fields of a `Results`."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
    }
