"""Levels of detail by relevance, against a loop over the definition, and what a reader would expect to see."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.kit.reducer_data import cosine, run, signals
from vlmcompress.reduction.methods import relevance

SHARPNESS = 3.0
CELLS = ((4, 4), (2, 2), (1, 2), (1, 1))


def tiles(rows, columns, height, width):
    """Tokens of each cell, cells in raster order, for one frame."""
    return [
        [r * width + c for r in range(y, min(y + rows, height)) for c in range(x, min(x + columns, width))]
        for y in range(0, height, rows)
        for x in range(0, width, columns)
    ]


def slow(s, count):
    """Groups of tokens: whole regions first, then always the dearest affordable step, cell by cell."""
    _, height, width = s.grid
    match = [max(cosine(f, q) for q in s.query) for f in s.features]
    regions = tiles(4, 4, height, width)
    best = [max(match[i] for i in region) for region in regions]
    scores = [math.exp(SHARPNESS * (b - min(best)) / (max(best) - min(best))) if len(best) > 1 else 1.0 for b in best]
    if count <= len(regions):
        return sorted(sorted(regions, key=lambda region: -scores[regions.index(region)])[:count])
    groups, level, query = (
        {k: [list(region)] for k, region in enumerate(regions)},
        dict.fromkeys(range(len(regions)), 0),
        {},
    )
    left = count - len(regions)

    def finer(k):
        return [t for t in tiles(*CELLS[level[k] + 1], height, width) if set(t) <= set(regions[k])]

    while left:
        for k in groups:  # a level that changes nothing costs nothing
            while level[k] < 3 and len(finer(k)) == len(groups[k]):
                level[k] += 1
        open_ = [k for k in groups if level[k] < 3]
        price = {k: min(query.get(k, math.inf), scores[k] / (len(finer(k)) - len(groups[k]))) for k in open_}
        k = max(open_, key=lambda k: (price[k], -level[k], -k))
        query[k] = price[k]
        for child in finer(k):
            parent = next(group for group in groups[k] if set(child) <= set(group))
            if left and child[-1] != parent[-1]:  # the last child is what is left of its parent
                groups[k].append(child)
                parent[:] = [i for i in parent if i not in child]
                left -= 1
        level[k] += 1
    return sorted(sorted(group) for children in groups.values() for group in children)


@pytest.mark.parametrize("grid", [(1, 8, 12), (1, 7, 5), (1, 3, 3), (1, 1, 9), (1, 12, 18)])
@pytest.mark.parametrize("keep", [0.05, 0.2, 0.41, 0.7, 0.93])
def test_levels_of_detail(grid, keep):
    s, chosen = signals(grid, seed=3), relevance.Relevance(keep=keep)
    got, x = run(chosen, s), torch.randn(math.prod(grid), 3, dtype=torch.float64)
    groups = slow(s, chosen.budget(grid))
    tokens_by_output = sorted((got.target == row).nonzero().squeeze(1).tolist() for row in range(len(got.anchor)))
    assert tokens_by_output == groups
    means = {group[len(group) // 2]: x[group].mean(0) for group in groups}
    assert torch.allclose(got.apply(x), torch.stack([means[anchor] for anchor in got.anchor.tolist()]), atol=1e-6)


def picture():
    """24 x 24 tokens that all point away from the question, but for one at row 9, column 14."""
    features = torch.zeros(576, 2)
    features[:, 1] = 1
    features[9 * 24 + 14] = torch.tensor([1.0, 0])
    return dataclasses.replace(signals((1, 24, 24)), features=features, query=torch.tensor([[1.0, 0.0]]))


def test_what_the_question_is_about_keeps_every_token():
    got = run(relevance.Relevance(keep=64 / 576), picture())
    size = got.sizes[got.target].view(24, 24)  # tokens averaged into what stands for each
    assert (size[8:12, 12:16] == 1).all() and (got.target >= 0).all()
    elsewhere = size.clone()
    elsewhere[8:12, 12:16] = 16
    assert (elsewhere >= 4).all() and elsewhere.float().mean() > 8


def test_without_a_question_all_regions_are_alike():
    mute = dataclasses.replace(picture(), query=torch.zeros(0, 2))
    assert run(relevance.Relevance(keep=144 / 576), mute).sizes.tolist() == [4] * 144  # 36 regions at "low"
