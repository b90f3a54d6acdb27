"""The manifest `vlmcompress.json`: how a checkpoint was made, and the hash of each of its files.

Schema 1, one JSON object:

| key | content |
|---|---|
| schema_version | 1 |
| created_by | versions of vlmcompress and of the packages that shape the result |
| model | family, name (on the Hub: id and commit), hashes of the source's config and of its safetensors headers |
| recipe, seed | the recipe as resolved |
| calibration | the data that statistics came from (hash, counts, tokens by modality), or null |
| errors | linear layer -> modality -> relative squared output error `|X dW^T|^2 / |X W^T|^2`, and what rounding X adds |
| maxima | first linear layer of a group -> modality -> share of its input channels whose maximum is that modality's |
| kv_cache | attention module -> ranges, clipping and rounding of keys and values by modality (`statistics.kv_range`), or {} |
| warnings | what happened otherwise than asked for, a line each |
| visual_tokens | of a reduced checkpoint: tokens of a prompt with one typical image, before and after |
| recovery | of a recovered checkpoint: settings, what was trained, held-out divergence before and after, steps |
| allocation | where the recipe has `bits`: the widths of groups with all predicted errors, bits per weight, uniform widths |
| devices | how many devices, of 1, 2, 4 and 8, vLLM can share the model out among (tensor parallelism) |
| size | bytes of weights before and after |
| tensors | number of stored tensors |
| timing | phase of the run -> seconds, up to the writing of this file |
| files | name -> sha256 and size, of every file but this one |

No dates, no paths of the machine: the same inputs give the same file, but for `timing`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmcompress.common import identity, json_files
from vlmcompress.common.identity import sha256, source_identity, versions
from vlmcompress.errors import UserError

MANIFEST = "vlmcompress.json"
SCHEMA_VERSION = 1
OF_OUTPUTS = "squared error of a layer's output relative to the output, over the tokens of a modality"
OF_WEIGHTS = "squared error of a layer's weights relative to the weights"


def error_kind(name: str) -> str:
    """The name of a kind of layer error: a modality, or `weight`, the only kind of a scheme without calibration data."""
    return "weights" if name == "weight" else name


def errors_text(errors: Mapping[str, Mapping[str, float]]) -> str:
    """What the errors of layers are, as a sentence; "" where there are none."""
    if not errors:
        return ""
    if all(set(error) <= {"weight"} for error in errors.values()):
        return f"{OF_WEIGHTS[:1].upper()}{OF_WEIGHTS[1:]}, as no calibration data were seen."
    return f"{OF_OUTPUTS[:1].upper()}{OF_OUTPUTS[1:]}."


def build(
    source: Path,
    *,
    family: str,
    recipe: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
    errors: Mapping[str, Mapping[str, float]],
    maxima: Mapping[str, Mapping[str, float]] | None = None,
    kv_cache: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
    allocation: Mapping[str, Any] | None = None,
    visual_tokens: Mapping[str, Any] | None = None,
    recovery: Mapping[str, Any] | None = None,
    devices: Sequence[int] | None = None,
) -> dict:
    """Build the manifest without sizes and hashes, which `checkpoint.write` adds.

    Args:
        source: folder of the original checkpoint.
        family: name of its `ModelSpec`.
        recipe: the resolved recipe as plain data, with its `seed`.
        calibration: None for a data-free scheme. This and the others are entries of the table above, by memory names of
            layers; an `allocation`, `visual_tokens`, `recovery` or `devices` that is None is left out.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "created_by": versions(),
        "model": {"family": family, **source_identity(source)},
        "recipe": _portable(recipe),
        "seed": recipe.get("seed"),
        "calibration": _portable(calibration),
        "errors": {name: dict(by_modality) for name, by_modality in errors.items()},
        "maxima": dict(maxima or {}),
        "kv_cache": dict(kv_cache or {}),
        "warnings": list(warnings),
        **({"allocation": dict(allocation)} if allocation else {}),
        **({"visual_tokens": dict(visual_tokens)} if visual_tokens else {}),
        **({"recovery": dict(recovery)} if recovery else {}),
        **({"devices": list(devices)} if devices is not None else {}),
    }


def hash_files(folder: Path) -> dict[str, dict]:
    """Hash the files below `folder`, the manifest aside: name -> sha256 and size, sorted by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in files if path != folder / MANIFEST}


def hash_file(path: Path) -> dict[str, str | int]:
    """What the manifest records of a file: its sha256 and size."""
    return {"sha256": sha256(path), "size": path.stat().st_size}


def read(folder: Path) -> dict:
    """Read the manifest of a checkpoint that vlmcompress wrote.

    Raises:
        UserError: there is none, it is not readable, or a later version of vlmcompress wrote it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} has no {MANIFEST}; give a folder written by `vlmcompress quantize`")
    try:
        content = json_files.read(path)
        version = content["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a readable manifest; quantize again") from error
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has schema {version}, this vlmcompress reads {SCHEMA_VERSION}; update vlmcompress")
    return content


def model_hash(folder: Path) -> str:
    """`identity.model_hash` of a folder; of what we wrote the manifest's hashes are taken, but of files written to since."""
    path, files = folder / MANIFEST, identity.model_files(folder)
    if not path.is_file():
        return identity.content_hash(files)
    recorded, written = read(folder).get("files") or {}, path.stat().st_ctime_ns
    hashes = {}
    for file in files:
        record, stat = recorded.get(file.name) or {}, file.stat()
        if record.get("size") == stat.st_size and max(stat.st_mtime_ns, stat.st_ctime_ns) <= written:
            hashes[file.name] = record["sha256"]
    return identity.content_hash(files, hashes)


def verify(folder: Path, content: Mapping[str, Any]) -> None:
    """Compare the hashes of a checkpoint's weights and config with its manifest; all of these files are read.

    Raises:
        UserError: one of them is missing, not recorded, or not what was written.
    """
    recorded = content.get("files")
    if not isinstance(recorded, Mapping):
        raise UserError(f"{folder / MANIFEST} lacks 'files', the hashes of what was written; quantize again")
    # What decides what a checkpoint computes: its weights and its config.
    names = {path.name for path in folder.glob("*.safetensors")} | {path.name for path in folder.glob("config.json")}
    names |= {name for name in recorded if str(name).endswith(".safetensors") or name == "config.json"}
    for name in sorted(names):
        record, path = recorded.get(name), folder / name
        if Path(name).name != name or not isinstance(record, Mapping) or not path.is_file():
            what = "is missing" if name in recorded else f"is not recorded in {MANIFEST}"
            raise UserError(f"{path} {what}, so the errors recorded there may be of other weights; quantize again")
        if path.stat().st_size != record.get("size") or sha256(path) != record.get("sha256"):
            raise UserError(
                f"{path} is not what was written, its hash is not the one in {MANIFEST}, so the errors recorded there may be "
                "of other weights; copy the checkpoint or quantize again"
            )


def _portable(value: Any) -> Any:
    """Remove paths of this machine from JSON data: an absolute path becomes its last part."""
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.startswith(("/", "~", "./", "../"))):
        return Path(os.fspath(value)).name
    return value
