"""The manifest `vlmcompress.json`: how a checkpoint was produced, and the hash of each of its files.

It has no dates and no local paths, so that equal inputs give equal files, except for `timing`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from vlmcompress.reduction.resize import Resize
from vlmcompress.utils import identity, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.identity import sha256, source_identity, versions
from vlmcompress.utils.schema import Amount, Count, Number, Place

MANIFEST = "vlmcompress.json"
SCHEMA_VERSION = 1
OPTIONAL = ("allocation", "visual_tokens", "devices")
OF_OUTPUTS = "squared error of a layer's output relative to the output, over the tokens of a modality"
OF_WEIGHTS = "squared error of a layer's weights relative to the weights"


def error_kind(name: str) -> str:
    """The name of a kind of layer error: a modality, or `weight`, the only kind of a scheme without calibration data."""
    return "weights" if name == "weight" else name


def errors_text(errors: Mapping[str, Mapping[str, float]]) -> str:
    """A sentence that defines the errors of layers; "" without errors."""
    if not errors:
        return ""
    if all(set(error) <= {"weight"} for error in errors.values()):
        return f"{OF_WEIGHTS[:1].upper()}{OF_WEIGHTS[1:]}, as no calibration data were seen."
    return f"{OF_OUTPUTS[:1].upper()}{OF_OUTPUTS[1:]}."


def measured_text(calibration: Mapping[str, Any]) -> str:
    """The samples that errors of layers were measured on, in words. `calibration`: a manifest's."""
    held_out, count = calibration.get("held_out", 0), calibration.get("samples")
    if held_out:
        return f"{held_out} other sample{'s' * (held_out > 1)} of '{calibration.get('source')}'"
    few = f"the {count} calibration samples" if count != 1 else "the one calibration sample"
    return f"{few} of '{calibration.get('source')}', of others they are larger"


Kind = Literal["text", "vision", "answer", "weight"]
"""The modality whose outputs an error is measured on, or `weight` for errors of the weights."""
_ByKind = dict[Kind, Amount]
Original = TypedDict("Original", {"family": str, "source": str, "config_sha256": str, "headers_sha256": str})
_Text = TypedDict("_Text", {"source": str, "samples": Count})
_Cache = TypedDict("_Cache", {"maximum": _ByKind, "clipped": dict[Kind, Amount | None], "error": _ByKind})
_Size = TypedDict("_Size", {"weights_before": Count, "weights_after": Count})
_Tokens = TypedDict("_Tokens", {"image": str, "before": Count, "after": Count | None})
_Bits = TypedDict("_Bits", {"bits": Number})
_Formats = TypedDict("_Formats", {"from": str, "to": str})
File = TypedDict("File", {"sha256": str, "size": Count})


class _Recipe(TypedDict, total=False):
    scheme: str
    format: str
    options: dict[str, Any]
    vision: str | None
    kv_cache: str | None
    skip: list[str]
    resize: Resize | None
    engine: str
    target: str | None


class CalibrationData(TypedDict):
    """Calibration data: name, hash and counts. `prefix`: blocks were observed after "float" or "quantized" ones."""

    source: str
    samples: Count
    sha256: NotRequired[str]
    tokens: NotRequired[dict[str, Count]]
    fitted: NotRequired[dict[str, Count]]  # those of them that layers were fitted to, where not all
    images: NotRequired[Count]
    image_hashes: NotRequired[list[str]]  # by which an evaluation finds its own images among them
    text: NotRequired[_Text | None]
    seed: NotRequired[int]
    prefix: NotRequired[str | None]
    held_out: NotRequired[Count]  # further samples, which errors of layers were measured on


class Manifest(TypedDict):
    """The JSON object of the file: the fields that are read back, of more."""

    schema_version: int
    created_by: dict[str, str]  # versions of vlmcompress and of packages that affect the result
    model: Original  # its name (on the Hub: id and commit), hashes of its config and of its safetensors headers
    recipe: _Recipe  # as resolved
    seed: int | None
    calibration: CalibrationData | None
    errors: dict[str, _ByKind]  # linear layer -> `|X dW^T|^2 / |X W^T|^2`, and what rounding X adds
    maxima: NotRequired[dict[str, _ByKind]]  # first layer of a group -> share of input channels whose maximum is there
    kv_cache: NotRequired[dict[str, dict[Literal["k", "v"], _Cache]]]  # attention module -> see `statistics.kv_range`
    warnings: list[str]  # deviations from the recipe
    visual_tokens: NotRequired[_Tokens]
    allocation: NotRequired[_Bits]  # `bits` of the recipe: bits per weight, widths, errors
    converted: NotRequired[_Formats]
    devices: NotRequired[list[int]]  # those of 1, 2, 4 and 8 devices over which vLLM can split the model
    size: _Size  # bytes of weights
    tensors: NotRequired[Count]
    timing: NotRequired[dict[str, Number]]  # phase of the run -> seconds, up to the writing of this file
    files: dict[Place, File]  # every file but this one


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
    **optional: Any,
) -> dict:
    """Build the manifest without sizes and hashes: callers add `size.weights_before`, `export.write` the rest.

    Args:
        source: folder of the original checkpoint.
        family: name of its `ModelSpec`.
        recipe: the resolved recipe as plain data, with its `seed`.
        calibration: None for a data-free scheme. This and the others are fields of `Manifest`, by memory names of layers.
        optional: fields in `OPTIONAL`; None is left out.
    """
    if unknown := optional.keys() - set(OPTIONAL):
        raise TypeError(f"a manifest has no {', '.join(sorted(unknown))}")
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
        **{name: optional[name] for name in OPTIONAL if optional.get(name) is not None},
    }


def hash_file(path: Path) -> dict[str, str | int]:
    """The manifest's entry for a file: its sha256 and size."""
    return {"sha256": sha256(path), "size": path.stat().st_size}


def hash_files(folder: Path, describe: Callable[[Path], dict] = hash_file) -> dict[str, dict]:
    """The manifest's entries of all files below `folder` but itself, sorted by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): describe(path) for path in files if path != folder / MANIFEST}


def read_manifest(folder: Path) -> dict:
    """Read the manifest of a checkpoint that vlmcompress wrote.

    Raises:
        UserError: the manifest is missing or unreadable, or a later version of vlmcompress wrote it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} has no {MANIFEST}; give a folder written by `vlmcompress quantize`")
    return schema.read_typed(Manifest, path, "quantize again", version=SCHEMA_VERSION)


def checkpoint_hash(folder: Path) -> str:
    """`identity.model_hash` of a folder; hashes of unchanged files are taken from our manifest, if there is one."""
    files = identity.model_files(folder)
    if not (folder / MANIFEST).is_file():
        return identity.content_hash(files)
    recorded = read_manifest(folder)["files"]
    hashes = {path.name: recorded[path.name]["sha256"] for path in files if _untouched(path, recorded.get(path.name))}
    return identity.content_hash(files, hashes)


def _untouched(path: Path, record: Mapping[str, Any] | None) -> bool:
    """Whether a file has the size in the manifest next to it, and is not newer than the manifest."""
    stat, written = path.stat(), (path.parent / MANIFEST).stat().st_ctime_ns
    return record is not None and record["size"] == stat.st_size and max(stat.st_mtime_ns, stat.st_ctime_ns) <= written


def verify_hashes(folder: Path, content: Mapping[str, Any]) -> None:
    """Compare the hashes of a checkpoint's weights and config with its manifest; reads all of these files.

    Raises:
        UserError: one of them is missing, not recorded, or changed.
    """
    recorded = content["files"]
    # The files that determine a checkpoint's outputs.
    names = {path.name for path in folder.glob("*.safetensors")} | {path.name for path in folder.glob("config.json")}
    names |= {name for name in recorded if name.endswith(".safetensors") or name == "config.json"}
    for name in sorted(names):
        record, path = recorded.get(name), folder / name
        if Path(name).name != name or record is None or not path.is_file():
            what = "is missing" if name in recorded else f"is not recorded in {MANIFEST}"
            raise UserError(f"{path} {what}, so the recorded errors may be those of other weights; quantize again")
        if path.stat().st_size != record["size"] or hash_file(path) != record:
            raise UserError(
                f"{path} has changed since it was written (its hash differs from {MANIFEST}), so the recorded errors may be "
                "those of other weights; copy the checkpoint or quantize again"
            )


def _portable(value: Any) -> Any:
    """Remove local paths from JSON data: an absolute path becomes its last component."""
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.startswith(("/", "~", "./", "../"))):
        return Path(os.fspath(value)).name
    return value
