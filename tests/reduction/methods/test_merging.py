"""Methods that merge tokens, against the papers' definitions written as loops."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from tests.kit.reducer_data import LAYERS, best, cosine, digest, options, rows, run, signals, threads
from vlmcompress.reduction import methods
from vlmcompress.reduction.methods import Reduction, _tome, dymu, visionzip, vscan
from vlmcompress.reduction.methods._base import top


def head_mean(keys, heads):
    return keys.double().view(len(keys), heads, -1).mean(1)


def slow_visionzip(x, saliency, keys, dominant, contextual):
    """Rows by anchor: dominant ones, and targets plus the mean of the tokens assigned to them."""
    out = {i: x[i] for i in best(saliency.tolist(), dominant)}
    rest = [i for i in range(len(x)) if i not in out]
    targets = rest[:: max(1, len(rest) // contextual)][:contextual]
    guests = {i: [] for i in targets}
    for i in rest:
        if i not in targets:
            guests[max(targets, key=lambda t: cosine(keys[i], keys[t]))].append(x[i])
    for target, members in guests.items():
        out[target] = x[target] + torch.stack(members).mean(0) if members else x[target]
    return torch.stack([out[i] for i in sorted(out)]), sorted(out)


@pytest.mark.parametrize(("keep", "split"), [(0.5, (20, 4)), (1 / 3, (13, 3)), (0.9, (36, 7))])
def test_visionzip(keep, split):
    s, x = signals(), torch.randn(48, 5, dtype=torch.float64)
    got = run(visionzip.VisionZip(keep=keep), s)
    rows, anchors = slow_visionzip(x, s.saliency, head_mean(s.keys, s.heads), *split)
    assert got.anchor.tolist() == anchors
    assert torch.allclose(got.apply(x), rows, atol=1e-6)


def test_visionzip_presets_of_the_paper():
    """Of 576 tokens: 54 + 10, 108 + 20, 162 + 30."""
    s = signals((1, 24, 24))
    for dominant, contextual in ((54, 10), (108, 20), (162, 30)):
        got = run(visionzip.VisionZip(keep=(dominant + contextual) / 576), s)
        merged = (got.sizes > 1).sum().item()
        assert len(got.anchor) == dominant + contextual and merged == contextual and got.sizes.sum() == 576


def test_visionzip_without_contextual_tokens_drops_the_rest():
    """Of three tokens less than half of one is contextual."""
    s = signals()
    got = run(visionzip.VisionZip(keep=3 / 48), s)
    assert got.anchor.tolist() == sorted(best(s.saliency.tolist(), 3)) and got.sizes.tolist() == [1] * 3


def slow_vscan(s, count, side):
    """By falling score, as long as a window has not given its quota; the best of all; the dropped join their nearest."""
    (frames, height, width), local = s.grid, count // 2
    down, across = max(1, height // side), max(1, width // side)
    window_counts, kept = dict.fromkeys(itertools.product(range(frames), range(down), range(across)), 0), []
    for i in best(s.windowed.tolist(), s.n):
        f, r, c = i // (height * width), i // width % height, i % width
        window = (f, min(r // side, down - 1), min(c // side, across - 1))
        if len(kept) < local and window_counts[window] < math.ceil(local / len(window_counts)):
            kept.append(i)
            window_counts[window] += 1
    assert len(kept) == local
    others = sorted((i for i in range(s.n) if i not in kept), key=lambda i: (-s.saliency[i].item(), i))
    kept = sorted(kept + others[: count - local])
    groups = {i: [i] for i in kept}
    for i in set(range(s.n)) - set(kept):
        groups[max(kept, key=lambda k: cosine(s.features[i], s.features[k]))].append(i)
    return kept, groups


@pytest.mark.parametrize(
    ("grid", "keep", "side"),
    [((1, 6, 8), 0.5, 3), ((1, 6, 8), 0.11, 4), ((2, 5, 4), 0.3, 3), ((1, 11, 14), 0.6, 4), ((1, 3, 9), 0.4, 4)],
)
def test_vscan(grid, keep, side):
    s, x = signals(grid), torch.randn(signals(grid).n, 5, dtype=torch.float64)
    chosen = vscan.VScan(keep=keep, window=side)
    got = run(chosen, s)
    kept, groups = slow_vscan(s, chosen.budget(grid), side)
    assert got.anchor.tolist() == kept
    assert torch.allclose(got.apply(x), torch.stack([x[groups[i]].mean(0) for i in kept]), atol=1e-6)


def test_vscan_takes_as_many_from_each_window_as_published_where_that_divides():
    """96 of 24 x 24: 48 local ones, 3 from each of 16 windows of 6 x 6."""
    s = signals((1, 24, 24))
    tiles = vscan.windows(s.grid, 6)
    chosen = vscan.top_per_window(s.windowed, tiles, 48)
    assert torch.bincount(tiles[chosen]).tolist() == [3] * 16


def test_vscan_windows_take_in_what_does_not_divide():
    """As in the authors' code for Qwen2.5-VL: 11 x 6 tokens in windows of 4 are 2 x 1 windows, of 4 and 7 rows."""
    assert vscan.windows((1, 11, 6), 4).tolist() == [0] * 4 * 6 + [1] * 7 * 6
    assert vscan.windows((2, 2, 3), 4).tolist() == [0] * 6 + [1] * 6


def test_vscan_meets_a_count_beyond_the_quotas_of_its_windows():
    """20 x 20 in windows of 7: the smallest has 49 tokens, and its quota of 200 is 50."""
    scores = signals((1, 20, 20)).windowed
    chosen = vscan.top_per_window(scores, vscan.windows((1, 20, 20), 7), 200)
    assert len(set(chosen.tolist())) == 200


def test_visionzip_repeats_merging_with_the_same_bits():
    s, x = signals((1, 24, 24)), torch.randn(576, 1024, generator=torch.Generator().manual_seed(0))
    with threads(2):
        digests = {digest(run(visionzip.VisionZip(keep=64 / 576), s).apply(x)) for _ in range(10)}
    assert len(digests) == 1


def slow_tome_layer(x, size, keys, pairs):
    """One layer: `pairs` edges of the even rows to the odd ones, best first, each merging size-weighted."""
    n = len(x)
    edges = []
    for a in range(0, n, 2):
        b = max(range(1, n, 2), key=lambda j: cosine(keys[a], keys[j]))
        edges.append((cosine(keys[a], keys[b]), a, b))
    x, size, dropped = [row * s for row, s in zip(x, size, strict=True)], list(size), set()
    for _, a, b in sorted(edges, key=lambda edge: (-edge[0], edge[1]))[:pairs]:
        x[b], size[b] = x[b] + x[a], size[b] + size[a]
        dropped.add(a)
    left = [i for i in range(n) if i not in dropped]
    return torch.stack([x[i] / size[i] for i in left]), [size[i] for i in left]


@pytest.mark.parametrize("count", [5, 24, 38])
def test_pairs_merge_as_in_a_loop(count):
    s, x = signals(), torch.randn(48, 5, dtype=torch.float64)
    slow, size = x, [1] * 48
    merged = Reduction.identity(48)
    for pairs in dymu.schedule(48, count, LAYERS):
        now = dataclasses.replace(rows(s, merged), merged=merged)
        slow, size = slow_tome_layer(slow, size, head_mean(now.keys, s.heads), pairs)
        scores, partner = _tome.match(now.keys, s.heads)
        merged = merged.then(_tome.join(top(scores, pairs), partner, now))
        assert merged.sizes.tolist() == size
        assert torch.allclose(merged.apply(x), slow, atol=1e-5)
    assert merged.sizes.sum() == 48  # nothing is dropped


@pytest.mark.parametrize(
    ("n", "count", "layers"), [(576, 72, 24), (576, 64, 4), (49, 10, 3), (9, 9, 2), (7, 1, 3), (5, 3, 1)]
)
def test_tome_schedule_meets_the_budget(n, count, layers):
    pairs = dymu.schedule(n, count, layers)
    assert len(pairs) == layers and sum(pairs) == n - count
    for r in pairs:
        assert 0 <= r <= n // 2
        n -= r


def test_tome_schedule_is_even_where_it_can_be():
    assert dymu.schedule(576, 72, 24) == [21] * 24  # as in the papers
    with pytest.raises(ValueError, match="cannot be merged into 7 in 3 layers"):
        dymu.schedule(57, 7, 3)


def test_proportional_attention_equals_attention_over_the_copies():
    """Why log size is added to the logits: a token of size s then counts as s equal tokens."""
    query, keys, values, sizes = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 2), torch.tensor([1, 3, 2, 1, 4])
    r = Reduction.join(torch.tensor([0, 1, 1, 1, 4, 4, 6, 7, 7, 7, 7]))
    assert torch.equal(r.sizes, sizes)
    merged = (query @ keys.T + r.sizes.log()).softmax(-1) @ values
    assert torch.allclose(merged, (query @ r.expand(keys).T).softmax(-1) @ r.expand(values), atol=1e-6)


def test_dymu_merges_exactly_the_pairs_above_the_threshold():
    s = signals()
    keys, edges = head_mean(s.keys, s.heads), {}
    for a in range(0, 48, 2):
        b = max(range(1, 48, 2), key=lambda j: cosine(keys[a], keys[j]))
        if cosine(keys[a], keys[b]) > 0.75:
            edges[a] = b
    assert 0 < len(edges) < 24
    got = methods.merge_layer(dymu.DyMU(thresholds=(0.75,)), s, 0, 1)
    assert got.anchor.tolist() == [i for i in range(48) if i not in edges]
    assert all(got.target[a] == got.target[b] for a, b in edges.items())


def test_dymu_keeps_more_of_a_rich_image_than_of_a_plain_one():
    rich, chosen = signals(), options("dymu")
    plain = dataclasses.replace(rich, keys=rich.keys[:1].expand(48, -1))
    assert len(run(chosen, plain).anchor) == 3  # halved in each of four layers
    assert len(run(chosen, rich).anchor) > 20


def test_dymu_odd_count_merges_at_most_half():
    flat = dataclasses.replace(signals((1, 1, 9)), keys=torch.ones(9, 16))
    assert len(methods.merge_layer(dymu.DyMU(thresholds=(0.0,)), flat, 0, 1).anchor) == 5
    single = signals((1, 1, 1))
    assert len(methods.merge_layer(dymu.DyMU(thresholds=(-1.0,)), single, 0, 1).anchor) == 1


def test_dymu_thresholds_merge_the_requested_share_on_average():
    """On the batch that they are learned from, exactly; the threshold is the best cosine that does not merge."""
    images = [signals(seed=seed) for seed in range(6)]
    scores = [dymu.best(image) for image in images]
    tau = dymu.threshold(scores, r=7.5)
    assert tau == sorted(torch.cat(scores).tolist(), reverse=True)[45]
    kept = [len(methods.merge_layer(dymu.DyMU(thresholds=(tau,)), image, 0, 1).anchor) for image in images]
    assert sum(48 - count for count in kept) == 45 and len(set(kept)) > 1


def test_dymu_thresholds_are_never_negative():
    high, low, away = torch.tensor([0.75, 0.5]), torch.tensor([0.25, 0.125]), torch.tensor([-0.5, -0.75])
    assert dymu.threshold([high, low], r=0.5) == 0.5
    assert dymu.threshold([away], r=1) == 0.0  # what points away never merges
    assert dymu.threshold([high, low], r=2) == 0.0  # everything may
    assert dymu.threshold([high], r=0) == 0.75


def test_dymu_thresholds_are_means_over_batches():
    assert dymu.average([[0.5, 0.25], [0.125, 0.0]]) == (0.3125, 0.125)
    for wrong in ([], [[0.5], [0.5, 0.25]]):
        with pytest.raises(ValueError, match="learned from"):
            dymu.average(wrong)


@pytest.mark.parametrize("count", [3, 5, 12, 24, 47, 48])
def test_dymu_to_an_exact_count(count):
    """Thresholds decide as long as that many are left; the last layers make up for the rest, the best pairs first."""
    s, chosen = signals(), options("dymu")
    merged, free = Reduction.identity(48), Reduction.identity(48)
    for layer in range(LAYERS):
        before = len(merged.anchor)
        step = merge_step(s, merged, chosen, layer, count)
        natural = before - len(merge_step(s, merged, chosen, layer, None).anchor)
        done, left = before - len(step.anchor), LAYERS - layer - 1
        least, most = max(0, before - count * 2**left), before - count
        assert done == min(max(natural, least), most)
        merged = merged.then(step)
        free = free.then(merge_step(s, free, chosen, layer, None))
    assert len(merged.anchor) == count and merged.sizes.sum() == 48
    same = merge_all(s, chosen, len(free.anchor))
    assert torch.equal(same.target, free.target) and torch.equal(same.weight, free.weight)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [3, 5, 12, 24, 40, 45])
@pytest.mark.parametrize("grid", [(1, 6, 8), (1, 5, 9)])
def test_dymu_padded_for_a_device_merges_the_same(grid, count, ties):
    """As many rows as there may be at most, whatever the values: those with tokens are the ones of a CPU, the others after."""
    chosen = options("dymu", thresholds=(0.9, 0.75, 0.5, 0.8))
    for seed in range(4):
        s = signals(grid, seed=seed)
        if ties:  # of few directions, so that most pairs are as good as others
            keys = torch.eye(8)[torch.randint(3, (s.n, 2), generator=torch.Generator().manual_seed(seed))]
            s = dataclasses.replace(s, keys=keys.flatten(1))
        plain = padded = Reduction.identity(s.n)
        for layer in range(LAYERS):
            now = dataclasses.replace(rows(s, padded), merged=padded)
            plain = plain.then(merge_step(s, plain, chosen, layer, count))
            padded = padded.then(dymu._padded(now, chosen.thresholds[layer], count, LAYERS - layer - 1))
            left = len(plain.anchor)
            assert len(padded.anchor) == min(s.n, count << (LAYERS - layer - 1)) >= left
            assert torch.equal(padded.target, plain.target) and torch.equal(padded.anchor[:left], plain.anchor)
            assert torch.equal(padded.sizes[:left], plain.sizes) and not padded.sizes[left:].any()
            assert torch.equal(rows(s, padded).features[:left], rows(s, plain).features)
        assert torch.equal(padded.require_valid().anchor, plain.anchor)


def merge_step(s, merged, chosen, layer, count):
    now = dataclasses.replace(rows(s, merged), merged=merged)
    return methods.merge_layer(chosen, now, layer, LAYERS, count)


def merge_all(s, chosen, count):
    merged = Reduction.identity(48)
    for layer in range(LAYERS):
        merged = merged.then(merge_step(s, merged, chosen, layer, count))
    return merged


def test_an_exact_count_out_of_reach_is_refused():
    with pytest.raises(ValueError, match="48 tokens cannot be merged into 2 in 4 layers"):
        merge_all(signals(), options("dymu"), 2)
    with pytest.raises(ValueError, match="cannot be merged into 49"):
        merge_all(signals(), options("dymu"), 49)
    with pytest.raises(ValueError, match="9 tokens cannot be merged into 10, which is more"):
        dymu.schedule(9, 10, 3)


def test_dymu_refuses_thresholds_of_another_model():
    with pytest.raises(ValueError, match="3 thresholds and 4 layers"):
        run(dymu.DyMU(thresholds=(0.1, 0.2, 0.3)), signals())
    with pytest.raises(ValueError, match="learn them"):
        run(dymu.DyMU(), signals())
    with pytest.raises(ValueError, match="cosines"):
        dymu.DyMU(thresholds=(1.5,))
