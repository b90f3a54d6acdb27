"""What is computed piece by piece equals what is computed at once, for sizes around each size of a piece.

Sizes of pieces are made small where the code reads them at call time.
"""

from __future__ import annotations

import pytest
import torch

from vlmcompress.statistics import collect
from vlmcompress.statistics.collect import Collector

PIECE = 8


def sizes(piece: int = PIECE, least: int = 1) -> list[int]:
    """Sizes of work around those at which pieces of `piece` are full."""
    return sorted({size for size in (0, 1, piece - 1, piece, piece + 1, 2 * piece, 2 * piece + 1) if size >= least})


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("later", [0, 1, PIECE])
@pytest.mark.parametrize("first", sizes(least=0))
def test_rows_that_wait_for_a_product(first, later, generator, monkeypatch):
    """Batches of which a modality fills the waiting rows exactly, or takes no part, leave nothing to wait and lose nothing."""
    monkeypatch.setattr(collect, "ROWS", PIECE)
    monkeypatch.setattr(collect, "_CACHE", 1)  # 16 rows at a time, the least
    collector = Collector(5, ["gram", "absmax", "absmean", "cross"])
    text, vision = torch.randn(2, 3, 5, generator=generator), torch.randn(2, first + later + 1, 5, generator=generator)
    batches = [(text, 1), (vision[:, :first], 2), (vision[:, first : first + later], 2), (vision[:, :0], 3)]
    for (x, original), code in batches:
        collector.add(x, torch.full((len(x),), code), original)
    stats = collector.finish()
    x, original = vision[:, : first + later].double()
    assert stats.count == {"text": 3, "vision": len(x), "answer": 0}
    if len(x):
        torch.testing.assert_close(stats.gram({"vision": 1.0}).double(), x.T @ x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stats.cross({"vision": 1.0}).double(), x.T @ (original - x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stats._absmax["vision"].double(), x.abs().amax(0))
        torch.testing.assert_close(stats._abssum["vision"].double(), x.abs().sum(0), rtol=1e-5, atol=1e-5)
