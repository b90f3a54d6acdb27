"""`vlmcompress.json`: how a checkpoint came to be and what each of its files must hash to.

Schema 1, one JSON object:

| key | content |
|---|---|
| schema_version | 1 |
| created_by | versions of vlmcompress and of the packages that shape the result |
| model | family, source name, hashes of the source's config and of its safetensors headers |
| recipe, seed | the recipe as resolved |
| calibration | what data statistics came from (hash, counts, tokens by modality), or null |
| errors | linear layer -> modality -> relative squared output error `|X dW^T|^2 / |X W^T|^2`, and what rounding X adds |
| maxima | first linear layer of a group -> modality -> share of its input channels whose maximum is that modality's |
| kv_cache | attention module -> ranges, clipping and rounding of keys and values by modality (`kv_range.report`); {} without |
| warnings | what went otherwise than asked for, a line each |
| visual_tokens | of a reduced checkpoint: tokens of a prompt with one typical image, before and after |
| allocation | where the recipe has `bits`: the widths of groups with all predicted errors, bits per weight, uniform widths |
| size | bytes of weights before and after |
| tensors | number of stored tensors |
| files | name -> sha256 and size, of every file but this one |

No dates, no paths of the machine: the same inputs give the same file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmcompress.common.identity import sha256, source_identity, versions
from vlmcompress.errors import UserError

MANIFEST = "vlmcompress.json"
SCHEMA_VERSION = 1


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
) -> dict:
    """Everything but sizes and hashes, which `checkpoint.write` adds.

    Args:
        source: folder of the original checkpoint.
        family: name of its `ModelSpec`.
        recipe: the resolved recipe as plain data, with its `seed`.
        calibration: where the statistics came from; None for a data-free scheme.
        errors: linear layer (memory name) -> modality -> relative output error.
        maxima: whose the maxima of the inputs of groups of layers are; for schemes that quantize activations.
        kv_cache: attention module (memory name) -> what an FP8 cache does to its keys and values.
        warnings: what went otherwise than asked for.
        allocation: how a budget of bits was shared out; None: one scheme for all groups.
        visual_tokens: what the reducer does to a prompt with an image; None: there is no reducer, or it cannot be said.
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
    }


def hash_files(folder: Path) -> dict[str, dict]:
    """Name -> sha256 and size of each file below `folder` but the manifest, by name."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != MANIFEST:
            found[name] = {"sha256": sha256(path), "size": path.stat().st_size}
    return found


def read(folder: Path) -> dict:
    """The manifest of a checkpoint that we wrote.

    Raises:
        UserError: there is none, it is not readable, or a later version of vlmcompress wrote it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} has no {MANIFEST}; give a folder written by `vlmcompress quantize`")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a readable manifest; quantize again") from error
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has schema {version}, this vlmcompress reads {SCHEMA_VERSION}; update vlmcompress")
    return content


def _portable(value: Any) -> Any:
    """The same data without paths of this machine: an absolute path becomes its last part."""
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.startswith(("/", "~", "./", "../"))):
        return Path(os.fspath(value)).name
    return value
