"""Q-VLM's ranges and runs of blocks, against the plain definition of a percentile and hand-made partitions."""

from __future__ import annotations

import pytest
import torch

from tests.kit.quant_data import weight
from vlmcompress.numerics import Format, round_to_nearest
from vlmcompress.quantization.schemes import qvlm, solve


@pytest.mark.parametrize("percentile", [1.0, 0.995, 0.98, 0.75])
@pytest.mark.parametrize("group", [-1, 32])
def test_ranges_cover_the_percentile(percentile, group):
    """torch.quantile of the magnitudes of each row's group is the end of the range."""
    w = weight(6, 128)
    w[3, 32:64] = 0
    share = qvlm.cover(w, Format("int", 4, group), percentile)
    pieces = w.abs().view(6, -1, 128 if group < 0 else group)
    expected = torch.quantile(pieces, percentile, dim=-1)
    torch.testing.assert_close(share * pieces.amax(-1), expected, rtol=1e-5, atol=1e-7)
    assert (share <= 1).all() and share.shape == (6, pieces.shape[1])


def test_candidates_are_the_papers():
    assert qvlm.percentiles(qvlm.Options()) == pytest.approx([1.0, 0.995, 0.99, 0.985, 0.98])


def test_rounds_to_nearest_in_those_ranges():
    """Full ranges without a search; with one, what lies outside is clipped and the rest is off by half a step at most."""
    w, plain, ranged = weight(8, 64), qvlm.Options(group_size=32), qvlm.Ranged(group_size=32, percentile=0.9)
    (full,) = solve(qvlm.SCHEME, [w], None, plain, torch.float32).weights
    assert torch.equal(full.dequantize(), round_to_nearest(w, qvlm.SCHEME.scheme(plain).weights).dequantize())
    (clipped,) = solve(qvlm.SCHEME, [w], None, ranged, torch.float32).weights
    pieces = w.view(8, 2, 32)
    share = (torch.quantile(pieces.abs(), 0.9, dim=-1) / pieces.abs().amax(-1))[..., None]
    low, high, step = pieces.amin(-1, True) * share, pieces.amax(-1, True) * share, clipped.scale[..., None]
    torch.testing.assert_close(step, (high - low) / 15)
    off = (clipped.dequantize(torch.float32).view(8, 2, 32) - pieces.clamp(low, high)).abs()
    inside = (pieces > low + step / 2) & (
        pieces < high - step / 2
    )  # zero is exact, which moves the ends by half a step
    assert (off[inside] <= (0.501 * step).expand_as(off)[inside]).all() and (off <= 1.001 * step).all()


@pytest.mark.parametrize(
    ("entropies", "depth", "runs"),
    [
        ([9, 3, 1, 3, 3, 3, 3, 1], 3, [[0, 1], [2, 3, 4], [5, 6], [7]]),
        ([9, 3, 1, 3, 3, 3, 3, 1], 1, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ([0, 2, 2, 2, 2], 2, [[0, 1], [2, 3], [4]]),
        ([5], 3, [[0]]),
    ],
)
def test_runs_of_blocks(entropies, depth, runs):
    """Mean of all but the first, above or at which a block joins the one before it, as long as the run is short."""
    assert qvlm.partition(entropies, depth) == runs


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"grid": 1}, {"lowest": 1.0}, {"sweeps": True}, {"group_size": 0}])
def test_options_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        qvlm.Options(**wrong)
