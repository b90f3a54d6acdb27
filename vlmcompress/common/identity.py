"""What things are, as names, versions and hashes."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

_PACKAGES = ("vlmcompress", "torch", "transformers", "llmcompressor", "compressed-tensors", "safetensors")


def versions() -> dict[str, str]:
    """Installed versions of what shapes the result; packages that are absent are left out."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def source_identity(source: Path) -> dict:
    """Name and hashes of the original: of its config and of the headers (names, shapes, places) of its weights."""
    headers = hashlib.sha256()
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            headers.update(stream.read(min(length, file.stat().st_size)))
    return {
        "source": source.resolve().name,
        "config_sha256": hashlib.sha256((source / "config.json").read_bytes()).hexdigest(),
        "headers_sha256": headers.hexdigest(),
    }


def sha256(path: Path) -> str:
    """The hash of one file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
