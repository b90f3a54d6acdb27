"""The tiny checkpoints of `tests/models`, and an image file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.calibration.kit import file_of, picture
from tests.models.conftest import checkpoint, loaded, pytest_generate_tests  # noqa: F401


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A PNG file in `tmp_path`."""
    path = tmp_path / "photo.png"
    path.write_bytes(file_of(picture()))
    return path
