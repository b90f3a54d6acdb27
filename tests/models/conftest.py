"""Tiny checkpoints, built once per test session."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import build
from vlmcompress.models import REGISTRY, VLM, load

FAMILIES = [*REGISTRY.names(), "smolvlm"]  # smolvlm: the second model type of idefics3


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family)`: folder of the tiny checkpoint; read only. `hub_names=False`: as transformers saves it."""

    @functools.cache
    def get(family: str, hub_names: bool = True) -> Path:
        if family == "smolvlm" and importlib.util.find_spec("num2words") is None:
            pytest.skip("SmolVLM's processor needs num2words")
        return build(family, tmp_path_factory.mktemp(family), hub_names=hub_names)

    return get


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[..., Path]) -> Callable[[str], VLM]:
    """`loaded(family)`: the tiny model; leave its weights alone."""
    return functools.cache(lambda family: load(checkpoint(family)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with a `family` argument run for every family."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)
