"""Applying and chaining reductions, against loops over tokens in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kit.reducer_data import digest, threads
from vlmcompress.reduction.methods import Reduction, Signals


def some(n, m, seed, scaled=False):
    """A reduction of `n` tokens to `m` with merged, plain and dropped ones and uneven weights."""
    g = torch.Generator().manual_seed(seed)
    anchor = torch.randperm(n, generator=g)[:m].sort().values
    target = torch.randint(-1, m, (n,), generator=g)
    target[anchor] = torch.arange(m)
    weight = torch.randint(1, 5, (n,), generator=g).float()
    return Reduction(target, anchor, weight, 0.5 + torch.rand(m, generator=g) if scaled else None).require_valid()


def slow_apply(r, x):
    """Each output a weighted mean, summed token by token."""
    result = []
    for row in range(len(r.anchor)):
        sources = [i for i in range(len(r.target)) if r.target[i] == row]
        total = sum(r.weight[i].item() for i in sources)
        mean = sum(r.weight[i].item() / total * x[i].double() for i in sources)
        result.append(mean if r.scale is None else r.scale[row].item() * mean)
    return torch.stack(result)


@pytest.mark.parametrize("scaled", [False, True])
def test_apply_is_the_weighted_mean(scaled):
    r, x = some(20, 8, 0, scaled), torch.randn(20, 3, 2, dtype=torch.float64)
    assert torch.allclose(r.apply(x), slow_apply(r, x), atol=1e-6)
    assert torch.allclose(r.apply(x.float()).double(), slow_apply(r, x.float()), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_that_are_not_merged_stay_bit_for_bit(dtype):
    r, x = some(30, 20, 1), torch.randn(30, 5).to(dtype)
    plain = (r.sizes == 1).nonzero().squeeze(1)
    assert 0 < len(plain) < 20 and r.apply(x).dtype == dtype
    assert torch.equal(r.apply(x)[plain], x[r.anchor[plain]])


def test_apply_gives_the_same_bits_in_every_call():
    """At CLIP's size, 576 rows into 64, with two threads that may add in any order; and the same bits with one."""
    r, x = some(576, 64, 7), torch.randn(576, 1024, generator=torch.Generator().manual_seed(8))
    with threads(2):
        digests = {digest(r.apply(x)) for _ in range(30)}
    assert digests == {digest(r.apply(x))}


def test_sums_of_weights_have_the_same_bits_in_every_call():
    """So many tokens that threads would share a sum: 60 tiles of 729."""
    r = some(43740, 60, 9)
    r = dataclasses.replace(r, weight=torch.rand(43740, generator=torch.Generator().manual_seed(9)) + 0.1)
    with threads(2):
        assert len({digest(r.coefficients) for _ in range(20)}) == 1


def test_sizes_count_tokens():
    r = some(30, 10, 2)
    assert r.sizes.tolist() == [r.target.tolist().count(row) for row in range(10)]


@pytest.mark.parametrize("scaled", [(False, False), (True, False), (False, True), (True, True)])
def test_chaining_is_applying_one_after_the_other(scaled):
    first, second = some(40, 17, 3, scaled[0]), some(17, 6, 4, scaled[1])
    both, x = first.then(second).require_valid(), torch.randn(40, 3, dtype=torch.float64)
    assert torch.allclose(both.apply(x), second.apply(first.apply(x)), atol=1e-6)
    assert torch.equal(both.anchor, first.anchor[second.anchor])
    assert both.sizes.sum() == (both.target >= 0).sum()


def test_means_of_means_weighted_by_size_are_plain_means():
    """What per-layer merging relies on: after any number of layers every token still counts exactly 1."""
    merged = Reduction.identity(49 * 4)
    for factor in (7, 7, 4):
        n = len(merged.anchor)
        parent = torch.arange(n) // factor * factor
        merged = merged.then(Reduction.join(parent, merged.sizes))
    assert merged.sizes.tolist() == [196] and merged.weight.tolist() == [1.0] * 196


@pytest.mark.parametrize("scaled", [False, True])
def test_side_by_side_is_each_by_itself(scaled):
    """A prompt: text, an image, text, another image."""
    parts = [Reduction.identity(3), some(20, 8, 5, scaled), Reduction.identity(2), some(9, 4, 6)]
    x = torch.randn(34, 2, dtype=torch.float64)
    pieces = [part.apply(piece) for part, piece in zip(parts, x.split([3, 20, 2, 9]), strict=True)]
    whole = Reduction.concat(parts).require_valid()
    assert torch.allclose(whole.apply(x), torch.cat(pieces))
    assert torch.equal(whole.apply(x)[:3], x[:3]) and whole.anchor[11:13].tolist() == [23, 24]


def test_expand_undoes_what_dropped_nothing():
    r = Reduction.join(torch.tensor([0, 0, 2, 0, 2]))
    assert r.expand(r.apply(torch.tensor([0.0, 1, 2, 5, 4]))).tolist() == [2, 2, 3, 2, 3]
    with pytest.raises(ValueError, match="cannot be undone"):
        Reduction.keep(torch.tensor([1]), 3).expand(torch.zeros(1))


def test_identity_returns_everything():
    x = torch.randn(5, 2).bfloat16()
    assert torch.equal(Reduction.identity(5).require_valid().apply(x), x)
    assert torch.equal(some(9, 4, 5).then(Reduction.identity(4)).apply(torch.eye(9)), some(9, 4, 5).apply(torch.eye(9)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchor": torch.tensor([2, 0])}, "ascend"),
        ({"anchor": torch.tensor([0, 1])}, "not among the sources"),
        ({"anchor": torch.tensor([0, 9])}, "anchor is out of range"),
        ({"target": torch.tensor([0, 0, 2])}, "target is out of range"),
        ({"weight": torch.tensor([1.0, 0.0, 1.0])}, "positive"),
        ({"weight": torch.ones(2)}, "length"),
        ({"scale": torch.ones(3)}, "scale"),
    ],
)
def test_invalid_reductions_are_refused(change, message):
    good = Reduction.join(torch.tensor([0, 0, 2])).require_valid()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **change).require_valid()


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="not kept"):
        Reduction.join(torch.tensor([1, 2, 2]))
    with pytest.raises(ValueError, match="3 tokens, not of 4"):
        Reduction.identity(3).apply(torch.zeros(4))
    with pytest.raises(ValueError, match="whole numbers"):
        Reduction.join(torch.tensor([0, 0])).apply(torch.arange(2))
    with pytest.raises(ValueError, match="the first leaves 2"):
        Reduction.keep(torch.tensor([0, 1]), 4).then(Reduction.identity(4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grid": (1, 0, 2)}, "grid"),
        ({"grid": (1, 2, 2), "features": torch.zeros(3, 2)}, "features has 3 rows for 4"),
        ({"grid": (1, 2, 2), "saliency": torch.tensor([0, 1, torch.nan, 0])}, "saliency holds NaN"),
        ({"grid": (1, 1, 2), "keys": torch.zeros(2, 9), "heads": 2}, "do not divide"),
        ({"grid": (1, 2, 2), "merged": Reduction.identity(3)}, "3 tokens were merged"),
    ],
)
def test_signals_that_contradict_themselves_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Signals(**fields)
