"""Names, versions and hashes that say which software, model and files a result depends on."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from vlmcompress.common import hub

_PACKAGES = ("vlmcompress", "torch", "transformers", "llmcompressor", "compressed-tensors", "safetensors")


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
