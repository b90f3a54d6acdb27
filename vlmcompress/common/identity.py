"""Names, versions and hashes that say which software, model and files a result depends on."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path

from vlmcompress.common import hub

_PACKAGES = ("vlmcompress", "torch", "transformers", "llmcompressor", "compressed-tensors", "safetensors")

_MODEL_FILES = (
    "*.safetensors",
    "*config.json",
    "token*",
    "vocab*",
    "merges*",
    "*.model",
    "chat_template*",
)  # what a model's answers depend on; not reports
_ENDS = 1 << 20  # bytes


def versions() -> dict[str, str]:
    """Installed versions of the packages that can change a result; absent ones are left out."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def source_identity(source: Path) -> dict:
    """Name (on the Hub: id and commit) of the original, hashes of its config and of its headers (names, shapes, places)."""
    headers = hashlib.sha256()
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            headers.update(stream.read(min(length, file.stat().st_size)))
    return {
        **hub.facts(source),
        "config_sha256": hashlib.sha256((source / "config.json").read_bytes()).hexdigest(),
        "headers_sha256": headers.hexdigest(),
    }


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_files(folder: Path) -> list[Path]:
    """The files of a folder that a model's answers depend on, sorted by name."""
    return sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)})


def fingerprint(folder: Path) -> str:
    """A quick hash of a model's files, in hexadecimal: names, sizes, and the first and the last megabyte of each.

    It is equal for copies of a folder on several machines, and differs where only weights do.
    """
    digest = hashlib.sha256()
    for file in model_files(folder):
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_ENDS))
            stream.seek(max(size - _ENDS, 0))
            digest.update(stream.read(_ENDS))
    return digest.hexdigest()
