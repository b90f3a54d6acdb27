"""Files whose content is edited for a while, so that nothing but their bytes shows it: the same names, sizes and times."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def edited(file: Path, content: bytes) -> Iterator[None]:
    """Another content of a file within the context, at the same time of last change."""
    before, stat = file.read_bytes(), file.stat()
    try:
        file.write_bytes(content)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@contextlib.contextmanager
def other_weights(model: Path) -> Iterator[None]:
    """Other weights of the same shapes in a model's folder within the context."""
    file = next(iter(sorted(model.glob("*.safetensors"))))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    with edited(file, bytes(content)):
        yield
