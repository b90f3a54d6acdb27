"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest

from tests.kit import tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.build(name, folder / name) for name in ("llava", "qwen2-5-vl")}
