"""How often the host waits for the device: never for a sample or a token, and for a block at most so often."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kit import reducer_data
from tests.kit.batched_samples import samples
from tests.kit.pretended_cuda import OTHERS, WAITS, counting
from tests.kit.pretended_cuda.checks import CUDA
from vlmcompress.models import decoder_blocks, load
from vlmcompress.models.data import encode as encoded
from vlmcompress.numerics.statistics.balance import Sensitivity
from vlmcompress.numerics.statistics.inputs import STATISTICS
from vlmcompress.quantization.calibration import block_inputs
from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.quantization.calibration.solve import QuantMethod, solve_block
from vlmcompress.reduction.methods import Signals
from vlmcompress.utils.registry import SCHEMES

BOUNDS = {
    **dict.fromkeys(("rtn", "w8a16", "fp8", "fp8-block", "mxfp8", "qvlm"), 14),
    **{"gptq": 49, "fp8-static": 64, "int8": 72, "mbq": 82, "awq": 103, "nvfp4": 127},
    **dict.fromkeys(("gptq-plus", "mxfp4", "w4a8-fp8"), 138),
}
"""Scheme -> most waits for solving one block of seven layers in four groups."""


def moved(image: Signals) -> Signals:
    fields = {field.name: getattr(image, field.name) for field in dataclasses.fields(image)}
    tensors = {name: value.to(CUDA) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return Signals(**fields | tensors, finite=True)


@pytest.mark.parametrize(("method", "options"), reducer_data.SERVED)
def test_served_reducers_do_not_wait(method, options):
    """They leave the CPU's rows. That no value is read, `test_waits.py` of the methods shows; here uploads count, too."""
    image = reducer_data.signals((1, 6, 8))
    expected, there = reducer_data.served(method, image, **options), moved(image)
    reducer_data.served(method, there, **options)  # tables are sent once
    with counting() as counts:
        rows = reducer_data.served(method, there, **options)
    torch.testing.assert_close(rows.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert counts.waits == 0, counts.places


def captured(vlm, rows, needs=frozenset({"gram", "absmax"})) -> list[Any]:
    return list(capture_blocks(vlm, decoder_blocks(vlm.model, vlm.spec), rows, CaptureSpec(needs)))


def test_waits_of_capture(world, monkeypatch):
    """Twice the batches, or twice the tokens, cost no wait more, from the blocks' inputs to the statistics of their layers."""
    vlm = load(world / "llava")

    def waits(rows) -> int:
        with counting() as counts:
            assert all(block for _, block in captured(vlm, rows))
        return sum(times for (kind, _, place), times in counts.places.items() if kind in WAITS and OTHERS not in place)

    rows = encoded(samples(), vlm)
    few = waits(rows)
    assert few <= 1 + sum(map(len, decoder_blocks(vlm.model, vlm.spec)))  # is all of it finite: once for each group
    monkeypatch.setattr(block_inputs, "bucket_by_length", lambda rows: [[index] for index in range(len(rows))])
    assert waits(rows) == waits(rows + rows) <= few


@pytest.fixture(scope="module")
def observed(world) -> Callable[[int, frozenset[str]], tuple[Any, ...]]:
    """Number of samples and names of statistics -> groups, weights, norms and statistics of a block."""
    vlm = load(world / "llava")
    groups = decoder_blocks(vlm.model, vlm.spec)[0]
    smoothed = {group.smooth for group in groups if group.smooth_kind == "norm"}
    weights, norms = (
        {name: vlm.model.get_parameter(f"{name}.weight").detach().to(CUDA) for name in names}
        for names in ([name for group in groups for name in group.linears], smoothed)
    )

    @functools.cache
    def statistics_of(count: int, needs: frozenset[str]) -> Any:
        (_, block), *_ = captured(vlm, encoded(samples()[:count], vlm), needs)
        for stats in block.stats.values():
            stats.sensitivity = Sensitivity(rho=0.5)
        return block.stats

    return lambda count, needs: (groups, weights, norms, copy.deepcopy(statistics_of(count, needs)))


@pytest.mark.parametrize(("scheme", "count"), [*((name, 2) for name in SCHEMES.names() if name != "none"), ("gptq", 7)])
def test_waits_of_solving(observed, scheme, count):
    """More samples cost no wait more."""
    module = SCHEMES.get(scheme)
    method = QuantMethod(module, module.Options(**{"objective": "gram"} if scheme == "mbq" else {}))
    needs = (method.needs.statistics | {"gram"}) & STATISTICS
    groups, weights, norms, stats = observed(count, frozenset(needs))
    with counting() as counts:
        solve_block(groups, dict(weights), stats, method, torch.bfloat16, {}, norms, 0.0)
    assert counts.waits <= BOUNDS[scheme], counts.places.most_common(9)
