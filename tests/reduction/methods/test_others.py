"""Pixel prediction, views, falling rates and block masks, against their definitions written as loops."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from tests.kit.reducer_data import best, cosine, run, signals
from vlmcompress.reduction.methods import REGISTRY, Reduction, Signals, dyrate, litevlm, pevlm, pixelprune


def slow_pixelprune(pixels, rows, columns, tolerance):
    """Token by token in raster order, each compared with its prediction from what a decoder would have."""

    def alike(a, b):
        return (a - b).abs().max().item() <= tolerance

    reconstructed, kept = {}, []
    for r, c in itertools.product(range(rows), range(columns)):
        x = pixels[r * columns + c]
        if r == c == 0:
            guess = None
        elif r == 0:
            guess = reconstructed[r, c - 1]
        elif c == 0:
            guess = reconstructed[r - 1, c]
        else:
            left, above, corner = reconstructed[r, c - 1], reconstructed[r - 1, c], reconstructed[r - 1, c - 1]
            guess = above if alike(corner, left) and not alike(corner, above) else left
        reconstructed[r, c] = x if guess is None or not alike(x, guess) else guess
        if reconstructed[r, c] is x:
            kept.append(r * columns + c)
    return kept, reconstructed


@pytest.mark.parametrize(("rows", "columns"), [(6, 9), (9, 6), (1, 7), (7, 1)])
@pytest.mark.parametrize("tolerance", [0, 1, 2])
def test_pixelprune(rows, columns, tolerance):
    g = torch.Generator().manual_seed(rows)
    steps = torch.randint(0, 3, (2, rows * columns, 2), generator=g).float()
    s = Signals((2, rows, columns), pixels=steps.reshape(-1, 2))
    got = run("pixelprune", s, pixelprune.Options(tolerance=tolerance)).anchor.tolist()
    expected = []
    for frame in range(2):
        kept, reconstructed = slow_pixelprune(steps[frame], rows, columns, tolerance)
        expected += [frame * rows * columns + i for i in kept]
        assert max((steps[frame][r * columns + c] - x).abs().max() for (r, c), x in reconstructed.items()) <= tolerance
    assert got == expected


def test_pixelprune_of_a_page_keeps_its_ink_and_of_noise_everything():
    page = torch.ones(20, 30)
    page[5, 3:12], page[9:15, 20:26] = 0, 0.5
    kept = run("pixelprune", Signals((1, 20, 30), pixels=page.reshape(-1, 1)), pixelprune.Options()).anchor
    assert len(kept) <= 12  # corners of a line and a box, however large they are
    assert {5 * 30 + 3, 9 * 30 + 20} <= set(kept.tolist())
    noise = Signals((1, 20, 30), pixels=torch.rand(600, 3))
    assert len(run("pixelprune", noise, pixelprune.Options()).anchor) == 600
    flat = Signals((1, 20, 30), pixels=torch.ones(600, 3))
    assert run("pixelprune", flat, pixelprune.Options()).anchor.tolist() == [0]


def test_pixelprune_errors_do_not_add_up():
    """A slow ramp: each step is below the tolerance, so comparing with neighbours would keep one token of the whole."""
    ramp = Signals((1, 1, 40), pixels=torch.arange(40.0)[:, None])
    assert run("pixelprune", ramp, pixelprune.Options(tolerance=3)).anchor.tolist() == list(range(0, 40, 4))


def test_litevlm_keeps_the_views_asked_about():
    s = dataclasses.replace(signals((6, 1, 1)), saliency=litevlm.matches(["front", "rear"] * 3, "What is at the Rear?"))
    assert run("litevlm", s, litevlm.Options(keep=0.5, lexical=10)).anchor.tolist() == [1, 3, 5]
    scores = [max(cosine(view, word) for word in s.query) for view in s.features]
    plain = run("litevlm", s, litevlm.Options(keep=1 / 3, lexical=0))
    assert plain.anchor.tolist() == sorted(best(scores, 2))
    assert run(
        "litevlm", dataclasses.replace(s, query=s.query[:0]), litevlm.Options(keep=0.2, lexical=1)
    ).anchor.tolist() == [1]


def test_litevlm_matches_words_of_names():
    names = ["front_left camera", "rear camera", "", "REAR"]
    assert litevlm.matches(names, "Is the camera at the rear dirty?").tolist() == pytest.approx([1 / 3, 1, 0, 1])


def test_dyrate_follows_the_attention_and_never_brings_back():
    """Steps with attention 0.4, 0.1, 0.6 of the image's 48 tokens and factor 2: 80 %, 20 %, and no more than are left."""
    s, merged, counts, sets = signals(), Reduction.identity(48), [], [set(range(48))]
    for step, mass in enumerate((0.4, 0.1, 0.6)):
        attention = signals(seed=step).saliency[merged.anchor]
        attention = attention / attention.sum() * mass
        now = Signals(s.grid, saliency=attention, merged=merged)
        new = run("dyrate", now, dyrate.Options(factor=2.0, least=0.1))
        assert new.anchor.tolist() == sorted(best(attention.tolist(), len(new.anchor)))
        merged = merged.then(new)
        counts.append(len(merged.anchor))
        sets.append(set(merged.anchor.tolist()))
    assert counts == [39, 10, 10] and sets[3] <= sets[2] < sets[1] < sets[0]


def test_dyrate_keeps_the_least():
    s = Signals((1, 4, 5), saliency=torch.full((20,), 1e-6))
    assert run("dyrate", s, dyrate.Options(least=0.25)).anchor.tolist() == [0, 1, 2, 3, 4]
    for wrong in ({"factor": 0}, {"least": 1.5}, {"least": 0}, {"layer": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dyrate.Options(**wrong)


def test_pevlm_mask():
    lengths = pevlm.blocks((5, 1, 2), 3, 4, pevlm.Options(sink=1, frames=2))
    assert lengths == [5, 4, 4, 4]
    part = [k for k, length in enumerate(lengths) for _ in range(length)]
    got = pevlm.mask(lengths)
    for q, k in itertools.product(range(17), range(17)):
        assert got[q, k] == (k <= q and (part[k] == 0 or part[k] == part[q] or part[q] == 3))


def test_pevlm_of_one_block_is_causal_attention():
    lengths = pevlm.blocks((4, 2, 3), 5, 6, pevlm.Options(sink=1, frames=8))
    assert torch.equal(pevlm.mask(lengths), torch.ones(35, 35).tril().bool())
    assert pevlm.blocks((2, 1, 3), 0, 1, pevlm.Options(sink=9)) == [6, 1]


def test_pevlm_blocks_can_be_encoded_apart():
    """What the mask is for: a block's attention is the same without the other blocks."""
    lengths, x = [3, 4, 5, 2], torch.randn(14, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    full = attend(x[None], x[None], x[None], attn_mask=pevlm.mask(lengths))[0]
    alone = torch.cat([x[:3], x[7:12]])
    apart = attend(alone[None], alone[None], alone[None], is_causal=True)[0]
    assert torch.allclose(full[7:12], apart[3:], atol=1e-6)
    with pytest.raises(ValueError, match="lengths"):
        pevlm.mask([3])


def test_pevlm_keeps_all_tokens():
    assert REGISTRY.get("pevlm").budget((5, 1, 2), pevlm.Options()) == len(
        run("pevlm", signals((5, 1, 2)), pevlm.Options()).anchor
    )
