"""An image file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.pictures import file_of, picture


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A PNG file in `tmp_path`."""
    path = tmp_path / "photo.png"
    path.write_bytes(file_of(picture()))
    return path
