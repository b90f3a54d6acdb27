"""The command line in a test's own process."""

from __future__ import annotations

import pytest

from vlmcompress import cli
from vlmcompress.cli import _process


def run(capture: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a call; returns its exit code, and what it wrote to stdout and stderr."""
    code = cli.main([*map(str, arguments)])
    return code, *capture.readouterr()


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the process's logging as it is, in modules that import this."""
    monkeypatch.setattr(_process, "quiet_libraries", lambda: None)
