"""Tokens by modality and fair draws of them, whatever batches they come in."""

from __future__ import annotations

import math
from collections import Counter

import torch

from vlmcompress.numerics.statistics.balance import MODALITIES
from vlmcompress.numerics.statistics.tokens import Reservoir, split_modalities, splits, thinned


def test_a_reservoir_draws_uniformly_whatever_the_batches():
    """Each of 60 rows is kept 20/60 of the time; small inputs are kept whole; the same numbers keep the same places."""
    hits, seeds = Counter(), 600
    for seed in range(seeds):
        kept = Reservoir(20, seed)
        for batch in torch.arange(60.0)[:, None].split([7, 1, 30, 22]):
            kept.update(batch)
        rows = kept.rows()[:, 0].tolist()
        assert len(set(rows)) == 20
        hits.update(rows)
    spread = math.sqrt(seeds * (1 / 3) * (2 / 3))
    assert all(abs(hits[float(i)] - seeds / 3) < 4.5 * spread for i in range(60))
    first, second = Reservoir(5, 3), Reservoir(5, 3)
    for batch in torch.randn(4, 10, 2):
        first.update(batch)
        second.update(-batch)
    assert torch.equal(first.rows(), -second.rows()), "two blocks would not be measured on the same tokens"
    small = Reservoir(20, 0)
    small.update(torch.arange(3.0)[:, None])
    assert sorted(small.rows()[:, 0].tolist()) == [0, 1, 2]


def masks() -> list[torch.Tensor]:
    """Modalities of samples of 3 to 30 tokens, one without text, one of nothing that counts."""
    random = torch.Generator().manual_seed(0)
    masks = [torch.randint(0, 4, (1, n), generator=random, dtype=torch.uint8) for n in (9, 30, 3, 17, 30)]
    return [*masks, torch.full((1, 6), 2, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.uint8)]


def drawn(batches: list[list[int]], size: int, seed: int) -> dict[str, list[tuple[int, int] | None]]:
    """The oracle's way to read a split: modality -> the (sample, token) in each place, from padded ids of tokens."""
    samples = masks()
    by_name: dict[str, list[tuple[int, int] | None]] = {name: [None] * size for name in MODALITIES}
    for part, batch in zip(splits(samples, batches, size, seed), batches, strict=True):
        length = max(samples[i].numel() for i in batch)
        ids = [None] * (length * len(batch))
        for row, sample in enumerate(batch):
            for token in range(samples[sample].numel()):
                ids[(row + 1) * length - samples[sample].numel() + token] = (sample, token)
        assert part.tokens == len(ids)
        for code, name in enumerate(MODALITIES, start=1):
            expected = [i for i, key in enumerate(ids) if key and samples[key[0]][0, key[1]] == code]
            rows = part.rows.get(name, torch.empty(0))
            assert (list(range(part.tokens)) if rows is None else rows.tolist()) == expected
            assert part.count.get(name, 0) == len(expected)
            for place, row in zip(
                *(t.tolist() for t in part.drawn.get(name, ()) or (torch.empty(0),) * 2), strict=True
            ):
                assert by_name[name][place] is None and row in expected
                by_name[name][place] = ids[row]
    return by_name


def test_splits_do_not_depend_on_batches():
    """Every place is taken once, by a token of its modality, and by the same one in all batches; all where there are few."""
    alone = drawn([[i] for i in range(7)], 8, seed=1)
    assert alone == drawn([[6, 2, 0], [4, 1], [5, 3]], 8, seed=1) != drawn([[i] for i in range(7)], 8, seed=2)
    for code, name in enumerate(MODALITIES, start=1):
        assert None not in alone[name] and len(set(alone[name])) == 8
        every = [(s, t) for s, mask in enumerate(masks()) for t in range(mask.numel()) if mask[0, t] == code]
        assert drawn([[3, 0], [1, 2, 4], [5], [6]], 100, seed=0)[name] == every + [None] * (100 - len(every))


def test_thinned_masks_keep_proportions():
    """Exactly so many tokens stay; of each modality of each sample its share, rounded up or down, every one of them as likely;
    and the sum over modalities and samples is not off by what each is rounded."""
    whole = masks()
    total = sum(int((mask > 0).sum()) for mask in whole)
    hits = [torch.zeros(mask.shape) for mask in whole]
    for seed in range(400):
        kept = thinned(whole, 25, seed)
        assert sum(int((mask > 0).sum()) for mask in kept) == 25
        for before, after, hit in zip(whole, kept, hits, strict=True):
            assert after.shape == before.shape and torch.equal(after[after > 0], before[after > 0])
            for code in (1, 2, 3):
                assert abs(int((after == code).sum()) - int((before == code).sum()) * 25 / total) < 1
            hit += after > 0
        for code in (1, 2, 3):
            stay, share = (sum(int((mask == code).sum()) for mask in part) for part in (kept, whole))
            assert abs(stay - share * 25 / total) < 1
    for before, hit in zip(whole, hits, strict=True):
        for code in (1, 2, 3):
            drawn = hit[before == code]
            assert drawn.numel() == 0 or float((drawn - drawn.mean()).abs().max()) < 4.5 * math.sqrt(400 / 4)
    assert all(a is b for tokens in (0, total, total + 1) for a, b in zip(thinned(whole, tokens), whole, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(thinned(whole, 25, 0), thinned(whole, 25, 1), strict=True))


def test_a_batch_of_one_kind_needs_no_index():
    part = split_modalities(torch.full((2, 3), 3))
    assert part.rows == {"answer": None} and part.count == {"answer": 6} and not part.drawn
