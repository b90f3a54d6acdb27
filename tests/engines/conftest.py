"""An engine's interpreter that misbehaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vlmcompress.engines.vllm import PYTHON_VARIABLE


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the engine's interpreter a shell script with the given body."""

    def install(body: str) -> None:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv(PYTHON_VARIABLE, str(script))

    return install


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that passes for a checkpoint until an engine loads it."""
    folder = tmp_path / "tiny-vlm"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder
