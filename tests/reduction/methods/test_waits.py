"""No served method waits for the device of its signals: they run on tensors that have shapes and no values."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kit.reducer_data import COUNT, KEEP, SERVED, options, run, served, signals
from vlmcompress.reduction import methods
from vlmcompress.reduction.methods import REGISTRY, Reduction, Signals, _run


def bare(image: Signals) -> Signals:
    """Signals on PyTorch's device `meta`, where a look at a value, or a shape that depends on values, is an error."""
    fields = {field.name: getattr(image, field.name) for field in dataclasses.fields(image)}
    tensors = {name: value.to("meta") for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return Signals(**fields | tensors, finite=True)


@pytest.mark.parametrize(("name", "chosen"), SERVED)
def test_a_served_method_reads_no_value(name, chosen):
    image = signals((3, 4, 4) if name == "evs" else (1, 6, 8))
    rows = served(name, bare(image), **chosen)
    adaptive = REGISTRY.get(name).COUNT == "adaptive"
    count = COUNT if adaptive else len(run(options(name, keep=KEEP, **chosen), image).anchor)
    assert rows.shape == (count, image.features.shape[1])


def test_reading_signals_or_a_result_is_a_wait():
    image = bare(signals())
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        Signals(image.grid, features=image.features)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        Reduction.keep(torch.zeros(3, dtype=torch.int64, device="meta"), 48).require_valid()


BATCHED = [name for name in REGISTRY.names() if REGISTRY.get(name).BATCHED]


@pytest.mark.parametrize("name", BATCHED)
def test_images_at_once_are_reduced_as_each_by_itself(name):
    """Where kernels are launched, all images of a call go through each step together, without a wait."""
    images = [signals(seed=seed) for seed in range(5)]
    reducer = options(name, keep=KEEP)
    assert len(methods.reduce_all(reducer, [bare(image) for image in images], check=False)) == len(images)
    alone = [methods.reduce(reducer, image) for image in images]
    needed = [Signals(image.grid, features=image.features) for image in images]
    for result, expected in zip(_run._at_once(reducer, needed), alone, strict=True):
        assert torch.equal(result.target, expected.target) and torch.equal(
            result.require_valid().anchor, expected.anchor
        )
