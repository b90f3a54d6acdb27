"""The merger of an encoder's rows, element by element: what goes into each row, in which order, and with which weight."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from tests.kit.reducer_data import cosine
from vlmcompress.reduction.methods import Merger, Reducer, Signals, _tome, dymu
from vlmcompress.reduction.methods._base import share, top
from vlmcompress.reduction.methods.dymu import DyMU

HEADS, WIDTH, LAYERS = 4, 12, 3


@dataclass(frozen=True)
class ToMe(Reducer):
    """As published: an even share of the merges in each layer."""

    MERGES = True
    keep: float = 0.5

    def merge_layer(self, signals, layer, layers, count=None):
        """Merge this layer's part of the pairs."""
        count = share(signals.grid, self.keep) if count is None else count
        scores, partner = _tome.match(signals.keys, signals.heads)
        pairs = dymu.schedule(signals.n, count, layers - layer)[0]
        return _tome.join(top(scores, pairs), partner, signals)


def rows(images: int, count: int, seed: int = 0) -> torch.Tensor:
    """Random rows `[images, count, WIDTH]`."""
    return torch.randn(images, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def place(grid, side: int, token: int, part: int) -> int:
    """The number in raster order of the `part`-th patch of a token."""
    _, height, width = grid
    frame, row, column = token // (height * width), token // width % height, token % width
    down, across = row * side + part // side, column * side + part % side
    return frame * height * width * side**2 + down * width * side + across


def slow_key(keys: torch.Tensor) -> list[float]:
    """A token's key from those of its patches `[parts, WIDTH]`: means over heads, one after another."""
    wide = WIDTH // HEADS
    return [sum(float(part[head * wide + i]) for head in range(HEADS)) / HEADS for part in keys for i in range(wide)]


def slow(grid, side: int, aside: int, x: torch.Tensor, keys, pairs: list[int]):
    """ToMe's layers on one picture's patches `[aside + patches, WIDTH]`: groups of tokens, and of each patch its row.

    keys: for each layer a function from a token's number and a part to its key.
    """
    count = grid[0] * grid[1] * grid[2]
    groups = [[token] for token in range(count)]
    for layer, number in enumerate(pairs):
        patches = [
            torch.tensor(slow_key(torch.stack([keys(layer, row, part) for part in range(side**2)])))
            for row in range(len(groups))
        ]
        edges = []
        for a in range(0, len(groups), 2):
            b = max(range(1, len(groups), 2), key=lambda j: cosine(patches[a], patches[j]))
            edges.append((-cosine(patches[a], patches[b]), a, b))
        for _, a, b in sorted(edges)[:number]:
            groups[b], groups[a] = groups[a] + groups[b], []
        groups = [group for group in groups if group]
    full = x.clone()
    for group, part in itertools.product(groups, range(side**2)):
        places = [aside + place(grid, side, token, part) for token in group]
        full[places] = sum(x[source] for source in places) / len(places)
    return groups, full


@pytest.mark.parametrize(
    ("grid", "side", "aside"), [((1, 4, 5), 2, 1), ((1, 4, 4), 3, 0), ((2, 3, 3), 2, 0), ((1, 5, 4), 1, 1)]
)
def test_blocks_merge_patch_by_patch(grid, side, aside):
    """Oracle: a loop over tokens and their patches. The keys of a layer are given by the rows that it gets."""
    count, square, images = grid[0] * grid[1] * grid[2], side**2, 2
    x = rows(images, aside + count * square)
    merger = Merger(ToMe(0.3), [grid] * images, LAYERS, aside, side=side)
    pairs = dymu.schedule(count, share(grid, 0.3), LAYERS)
    states, hidden, left = x, [], count
    for layer in range(LAYERS):
        hidden.append(rows(images, aside + left * square, seed=layer + 1))
        states = merger.merge(layer, states, hidden[-1], HEADS)
        left -= pairs[layer]
        assert states.shape[1] == aside + left * square
        bias = merger.bias(torch.float64)
        sizes = [
            torch.cat([torch.ones(aside), reduction.sizes.repeat_interleave(square)]).log()
            for reduction in merger.merged
        ]
        torch.testing.assert_close(bias[:, 0, 0], torch.stack(sizes).double(), atol=1e-6, rtol=1e-6)
    spread = merger.spread(states)
    for image in range(images):

        def key(layer, token, part, image=image):
            """Before anything merges, rows stand in raster order; then block by block."""
            at = place(grid, side, token, part) if layer == 0 else token * square + part
            return hidden[layer][image, aside + at]

        groups, full = slow(grid, side, aside, x[image], key, pairs)
        target = merger.merged[image].target.tolist()
        mine = [[token for token in range(count) if target[token] == row] for row in range(left)]
        assert mine == [sorted(group) for group in groups]
        torch.testing.assert_close(spread[image], full, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("side", [1, 2])
def test_as_long_as_nothing_merges_rows_are_the_same_tensor(side):
    x = rows(1, 1 + 12 * side**2)
    merger = Merger(DyMU(thresholds=(1.0, 1.0)), [(1, 3, 4)], 2, 1, side=side)
    for layer in range(2):
        assert merger.merge(layer, x, x, HEADS) is x and merger.bias(x.dtype) is None
    assert merger.spread(x) is x


def test_an_image_that_merges_nothing_is_unchanged_next_to_one_that_does():
    """Rows of both stand block by block then, padded on the right, and both find back to their places."""
    plain = rows(1, 1).expand(1, 16, -1)  # all patches are alike, so half the tokens merge
    x = torch.cat([rows(1, 16, seed=3), plain])
    merger = Merger(DyMU(thresholds=(0.99,)), [(1, 2, 2)] * 2, 1, side=2)
    states = merger.merge(0, x, x, HEADS)
    assert [len(reduction.anchor) for reduction in merger.merged] == [4, 2] and states.shape == (2, 16, WIDTH)
    assert merger.bias(torch.float32)[:, 0, 0].tolist()[1][8:] == [float("-inf")] * 8
    spread = merger.spread(states)
    assert torch.equal(spread[0], x[0])
    torch.testing.assert_close(spread[1], x[1], atol=1e-6, rtol=1e-6)
    assert not torch.equal(states[0], x[0]) and {*map(tuple, states[0].tolist())} == {*map(tuple, x[0].tolist())}


def test_patches_that_are_tokens_merge_as_without_blocks():
    """With one patch a token every row and key is handed to the method as it is, bit for bit."""
    x, keys = rows(2, 1 + 15), rows(2, 1 + 15, seed=1)
    merger = Merger(ToMe(0.4), [(1, 3, 5)] * 2, 1, aside=1, counts=[9, 9])
    states = merger.merge(0, x, keys, HEADS)
    for image in range(2):
        scores, partner = _tome.match(keys[image, 1:], HEADS)
        best = scores.argsort(descending=True, stable=True)[:6]
        expected = _tome.join(best, partner, Signals((1, 3, 5))).apply(x[image, 1:])
        assert torch.equal(states[image], torch.cat([x[image, :1], expected]))
