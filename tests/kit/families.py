"""Fixtures: tiny checkpoints of every family and their quantized forms, made once per test session."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.inputs import QUESTION, images
from tests.kit.tiny import build
from vlmcompress.models import REGISTRY, VLM, load, read_config, spec_for

FAMILIES = [*REGISTRY.names(), "smolvlm"]  # smolvlm: the second model type of idefics3

# One scheme that smooths with calibration data and one data-free scheme with the tower: between them all linear groups. Both
# with the output head, one with the embedding, which vLLM's CPU build runs in these formats.
RECIPES = {
    "awq": {"scheme": "awq", "head": "w4a16", "embeddings": "w8a16"},
    "fp8 with tower": {"scheme": "fp8", "vision": "fp8", "head": "fp8"},
}


def recipe_of(folder: Path, name: str) -> dict[str, str]:
    """One of `RECIPES` without what the model in a folder lacks."""
    spec = spec_for(read_config(folder))
    lacking = {"vision": not spec.vision_groups, "head": spec.engine.head_shares}
    lacking["embeddings"] = spec.engine.head_shares or spec.engine.embedding_whole
    return {key: value for key, value in RECIPES[name].items() if not lacking.get(key)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with a `family` argument run for every family."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)


def can_process(family: str) -> bool:
    """SmolVLM's processor needs a package that nothing else does."""
    return family != "smolvlm" or importlib.util.find_spec("num2words") is not None


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family)`: folder of the tiny checkpoint; read only. `hub_names=False`: as transformers saves it."""

    @functools.cache
    def get(family: str, hub_names: bool = True) -> Path:
        if not can_process(family):
            pytest.skip("SmolVLM's processor needs num2words")
        return build(family, tmp_path_factory.mktemp(family), hub_names=hub_names)

    return get


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[..., Path]) -> Callable[[str], VLM]:
    """`loaded(family)`: the tiny model; leave its weights alone."""
    return functools.cache(lambda family: load(checkpoint(family)))


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration data: four questions, with one and with two images."""
    folder = tmp_path_factory.mktemp("samples")
    for index, image in enumerate(images(2)):
        image.save(folder / f"{index}.png")
    rows = [{"image": picked, "question": QUESTION, "answer": "red"} for picked in ("0.png", "1.png")]
    rows += [{"image": ["0.png", "1.png"], "question": QUESTION, "answer": answer} for answer in ("red", "blue")]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "samples.jsonl"


@pytest.fixture(scope="session")
def quantized(
    checkpoint: Callable[..., Path], samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """`quantized(family, recipe)`: folder of the quantized tiny model, `recipe` a key of `RECIPES`."""

    from vlmcompress.quantization.run import quantize  # so that modules of `--quick` in these folders start soon
    from vlmcompress.recipe import resolve

    @functools.cache
    def get(family: str, recipe: str) -> Path:
        out = tmp_path_factory.mktemp("quantized") / "out"
        keys = {"model": str(checkpoint(family)), "out": str(out), **recipe_of(checkpoint(family), recipe)}
        keys["calibrate"] = {"data": str(samples), "samples": 4}
        quantize(resolve(keys).recipe)
        return out

    return get
