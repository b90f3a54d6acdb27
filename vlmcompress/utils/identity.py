"""Names, versions and hashes that identify the software, model and files a result depends on.

Whether files are the same is checked in two ways:

* `unchanged`: names, sizes and times. Free, and valid on one machine. For results that are quick to compute again: answers of
  an evaluation, blocks of an interrupted `quantize`, a rotated copy.
* `content_hash`: SHA-256 of all bytes, each file read once per process. For runs that take much longer than reading the model,
  and between machines.

`source_identity` is neither: it identifies a model in written files, by config and shapes alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.utils import hub
from vlmcompress.utils.model_folder import ADAPTER_CONFIG, processing_files, weight_files

if TYPE_CHECKING:
    from PIL.Image import Image

_PACKAGES = ("vlmcompress", "torch", "transformers", "compressed-tensors", "safetensors")


def versions() -> dict[str, str]:
    """Installed versions of the packages that can change a result; packages that are not installed are left out."""
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def json_digest(value: object, default: Callable[[Any], Any] | None = None) -> str:
    """SHA-256 of JSON data: equal for equal data in any order of keys. `default`: converts other values to JSON data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=default).encode()).hexdigest()


def image_content(image: Image) -> bytes:
    """An image's size and pixels, which are all that a model sees; files of equal images may differ."""
    return f"{image.width}x{image.height}:".encode() + image.tobytes()


def image_digest(image: Image) -> bytes:
    """SHA-256 of an image's size and pixels."""
    return hashlib.sha256(image_content(image)).digest()


def source_identity(source: Path) -> dict:
    """Name (on the Hub: id and commit) of the original, hashes of its config and of its headers (names, shapes, offsets)."""
    headers = hashlib.sha256()
    for file in _weights(source):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            headers.update(stream.read(min(length, file.stat().st_size)))
    return {
        **hub.source_facts(source),
        "config_sha256": sha256(source / "config.json"),
        "headers_sha256": headers.hexdigest(),
    }


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal. The file is read anew each time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """`sha256` of a file, cached in this process until the file is written to."""
    stat = path.stat()
    # ctime reveals a write even if a tool has reset mtime
    return _sha256_of(path.absolute(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@functools.cache
def _sha256_of(path: Path, *_stat: int) -> str:
    return sha256(path)


def model_files(folder: Path) -> list[Path]:
    """The files in a folder that affect the model's answers, sorted by name; reports are left out."""
    configs = [path for path in folder.glob("*config.json") if path.name != ADAPTER_CONFIG]
    return sorted({*_weights(folder), *configs, *(folder / place for place in processing_files(folder))})


def unchanged(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Name, size and modification time of each file; equal as long as nobody writes to them."""
    stats = [(path.name, path.stat()) for path in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def content_hash(files: Sequence[Path], recorded: Mapping[str, str] | None = None) -> str:
    """SHA-256 of the names and all bytes of `files`, in this order.

    An unchanged file is read only once per process. `recorded`: name -> known hash of files that are not read at all.
    """
    hashes = dict(recorded or {})
    for path in files:
        if path.name not in hashes:
            hashes[path.name] = sha256_once(path)
    return hashlib.sha256(json.dumps({path.name: hashes[path.name] for path in files}).encode()).hexdigest()


def model_hash(folder: Path) -> str:
    """`content_hash` of a model's weights, config, tokenizer and processor."""
    return content_hash(model_files(folder))


def _weights(folder: Path) -> list[Path]:
    return [path for path in weight_files(folder) if path.is_file()]
