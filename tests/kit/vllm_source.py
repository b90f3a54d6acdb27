"""vLLM's source with a change in it, as another version may have it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def package() -> Path:
    """The folder of the vLLM that is installed, which is not imported; the test is skipped where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parent


def edited(folder: Path, file: str, before: str, after: str) -> Path:
    """Make `folder` that package, of links but for `file`, in which each `before` is `after`. Returns the folder."""
    source, place = package(), folder
    for part in Path(file).parts:
        place.mkdir(parents=True)
        for other in source.iterdir():
            if other.name != part:
                (place / other.name).symlink_to(other)
        source, place = source / part, place / part
    text = source.read_text(encoding="utf-8")
    assert before in text
    place.write_text(text.replace(before, after), encoding="utf-8")
    return folder
