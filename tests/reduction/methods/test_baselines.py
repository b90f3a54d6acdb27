"""Pooling and coverage, against definitions that are slow or somebody else's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.kit.reducer_data import run, signals
from vlmcompress.reduction.methods import pool


@pytest.mark.parametrize("grid", [(1, 6, 8), (1, 7, 5), (3, 4, 5), (1, 1, 9)])
@pytest.mark.parametrize("window", ["2x2", "1x2", "3x1", "3x3", "9x9", "1x1"])
def test_pool_is_average_pooling(window, grid):
    """Oracle: torch's own average pooling, windows at the edges as small as they are."""
    s, chosen = signals(grid), pool.Pool(window=window)
    image = s.features.view(*grid, -1).permute(0, 3, 1, 2)
    means = F.avg_pool2d(image, chosen.sides, ceil_mode=True, count_include_pad=False)
    result = run(chosen, s)
    torch.testing.assert_close(result.apply(s.features), means.permute(0, 2, 3, 1).flatten(0, 2))
    assert len(result.anchor) == chosen.budget(grid) and (result.target >= 0).all()


def test_a_window_stands_where_its_middle_is():
    assert run(pool.Pool(window="3x3"), signals((1, 5, 7))).anchor.tolist() == [8, 11, 13, 22, 25, 27]
    assert run(pool.Pool(), signals((1, 2, 4))).anchor.tolist() == [0, 2]


@pytest.mark.parametrize("window", ["2", "0x2", "2x", "2x2x2", "65x1", "a", "100x1", 4])
def test_bad_windows_are_refused(window):
    with pytest.raises(ValueError, match="window must be"):
        pool.Pool(window=window)
