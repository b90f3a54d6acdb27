"""The Triton kernels against the steps in torch whose place they take on a GPU; without one, in Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from tests.kit.reducer_data import features
from vlmcompress.reduction.methods import _selecting, divprune
from vlmcompress.reduction.methods._base import unit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = find_spec("triton") is not None and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RUNS, reason="no GPU; pip install triton, and set TRITON_INTERPRET=1"),
]
COUNTS = [1, 5, 22, 37]  # of 45 tokens: a part of a block, several, and a last one that is not full


def cosines(seed: int) -> torch.Tensor:
    """Cosines `[2, 45, 45]` of the tokens of two images of one kind."""
    rows = torch.stack([unit(features(number, width=60)) for number in (seed, seed + 5)]).to(DEVICE)
    return rows @ rows.mT


@pytest.mark.parametrize("seed", range(10))
def test_far_apart(seed):
    itself = torch.eye(45, dtype=torch.bool, device=DEVICE)
    distance = (1 - cosines(seed)).masked_fill(itself, -torch.inf)
    from vlmcompress.reduction.methods import _greedy_kernels

    count = COUNTS[seed % 4]
    assert torch.equal(_greedy_kernels.spread(distance, count), divprune._steps(distance, count))


@pytest.mark.parametrize("seed", range(2, 12))
def test_maxima_of_large_sum(seed):
    from vlmcompress.reduction.methods import _greedy_kernels

    table = (cosines(seed) / 0.2).softmax(2)
    columns = table.mT[:, :, : 30 + seed].contiguous()
    taken = torch.zeros(2, 45, dtype=torch.bool, device=DEVICE)
    taken[:, [3, 7]] = seed % 3 == 0
    best = columns[:, [3, 7]].amax(1) * taken[:, 3:4]
    arguments = (columns, best, taken, COUNTS[seed % 4])
    assert torch.equal(_greedy_kernels.cover(*arguments), _selecting.stepwise(*arguments))
