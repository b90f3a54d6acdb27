"""Schemes, statistics, training and reducers give on the device what they give on the CPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import reduction_data
from tests.kit.attached_cases import given
from tests.kit.pretended_cuda import hidden
from tests.kit.pretended_cuda.checks import CUDA, FAMILIES, recipe
from vlmcompress.models import all_specs
from vlmcompress.quantization.run import quantize
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.methods import REGISTRY
from vlmcompress.reduction.support import family_problem
from vlmcompress.training.draft import DraftTraining, draft
from vlmcompress.training.learn_reducer import ScorerTraining, learn_reducer
from vlmcompress.utils.registry import SCHEMES

SLOW = pytest.mark.slow
VARIANTS = {
    **{name: {"scheme": name} for name in SCHEMES.names() if name != "none"},
    "mbq": {"scheme": "mbq", "options": {"objective": "gram"}},
    "mbq-by-mae": {"scheme": "mbq", "options": {"grid": 4}},
    "mbq-of-8-bits": {"scheme": "mbq", "options": {"activations": 8, "bits": 8, "grid": 4}},
}
# One with error feedback and all steps, one by block outputs, one with static ranges.
TYPICAL = {"gptq-plus", "mbq", "fp8-static"}


def near(ours: Mapping[str, Mapping[str, float]], theirs: Mapping[str, Mapping[str, float]]) -> None:
    """Errors by layer and modality agree, each modality's mean: sums in another order round single weights the other way."""
    assert ours.keys() == theirs.keys() and ours
    for modality in next(iter(theirs.values())):
        means = [statistics.fmean(errors[modality] for errors in side.values()) for side in (ours, theirs)]
        assert means[0] == pytest.approx(means[1], rel=0.1), modality


def same_twice(world: Path, folder: Path, **keys) -> None:
    with hidden():
        expected = quantize(recipe(world, folder / "cpu", **keys)).manifest["errors"]
    near(quantize(recipe(world, folder / "cuda", **keys)).manifest["errors"], expected)


@pytest.mark.parametrize("variant", [name if name in TYPICAL else pytest.param(name, marks=SLOW) for name in VARIANTS])
def test_every_scheme(world, tmp_path, variant):
    same_twice(world, tmp_path, **VARIANTS[variant])


def test_a_mixture_of_methods(world, tmp_path):
    """After a reducer, with the tower's attention, ranges of the cache, and a rotation."""
    same_twice(
        world, tmp_path, scheme="gptq", family="qwen2-5-vl", reduce="divprune:0.5", kv_cache="fp8", rotate="hadamard"
    )


FEW: dict[str, Any] = {"steps": 2, "batch": 2, "every": 2, "lr": 1e-3}


def learned(world: Path, folder: Path) -> Any:
    chosen = training_recipe(world, folder / "scorer.safetensors", scheme="none")
    return learn_reducer(chosen, ScorerTraining(keep=0.5, **FEW | {"steps": 4, "every": 4}))["held_out_kl"]


def drafted(world: Path, folder: Path) -> Any:
    chosen = training_recipe(world, folder / "draft", scheme="none", family="qwen2-5-vl")
    return draft(chosen, DraftTraining(answer_tokens=6, **FEW))["held_out_kl"]


def training_recipe(world: Path, out: Path, **keys: Any) -> Any:
    return recipe(world, out, calibrate={"data": str(world / "train" / "calib.jsonl"), "samples": 16}, **keys)


@pytest.mark.parametrize("train", [learned, pytest.param(drafted, marks=SLOW)])
def test_training(world, tmp_path, train: Callable[[Path, Path], Any]):
    """What is held out is as far from the teacher as on the CPU, before and after some steps."""
    with hidden():
        expected = train(world, tmp_path / "cpu")
    divergences = train(world, tmp_path / "cuda")
    assert divergences.keys() == expected.keys() and len(expected) > 1
    for name, value in expected.items():
        assert divergences[name] == (value if name == "unit" else pytest.approx(value, rel=0.1)), name


@pytest.mark.parametrize("family", ["llava", *(pytest.param(name, marks=SLOW) for name in FAMILIES if name != "llava")])
def test_every_reducer_attached(family):
    """The logits after a reducer are those of the CPU, for every method that the family can have."""
    spec = next(spec for spec in all_specs() if spec.family == family)
    vlm = reduction_data.tiny(family)
    inputs = reduction_data.encode(vlm, reduction_data.ONE)
    for method in REGISTRY.names():
        options = REGISTRY.get(method)
        if options.keep is None or family_problem(spec, method) is not None or method == "learned":
            continue
        logits = {}
        for device in ("cpu", CUDA):
            vlm.model.to(device)
            with torch.no_grad(), attach(vlm, method, given(method)):
                logits[device] = vlm.model(**{name: value.to(device) for name, value in inputs.items()}).logits.cpu()
        assert logits["cpu"].shape == logits[CUDA].shape, method
        torch.testing.assert_close(logits[CUDA], logits["cpu"], rtol=1e-6, atol=1e-6, msg=method)
    vlm.model.to("cpu")
