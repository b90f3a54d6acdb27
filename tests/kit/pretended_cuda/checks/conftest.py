from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import calibration_rows, tiny
from tests.kit.pretended_cuda.checks import FAMILIES


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models and calibration data."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 4, lambda i: [] if i == 0 else f"{i}.png")
    (folder / "train").mkdir()
    calibration_rows.write(folder / "train", 16, kinds=8)
    for family in FAMILIES:
        tiny.build(family, folder / family)
    return folder
