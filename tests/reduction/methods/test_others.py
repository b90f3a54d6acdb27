"""Views, falling rates and block masks, against their definitions written as loops."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from tests.kit.reducer_data import best, cosine, run, signals
from vlmcompress.reduction.methods import Reduction, Signals, dyrate, litevlm, pevlm


def test_litevlm_keeps_the_views_of_the_question():
    s = dataclasses.replace(signals((6, 1, 1)), saliency=litevlm.matches(["front", "rear"] * 3, "What is at the Rear?"))
    assert run(litevlm.LiteVLM(keep=0.5), s).anchor.tolist() == [1, 3, 5]
    scores = [max(cosine(view, word) for word in s.query) for view in s.features]
    plain = run(litevlm.LiteVLM(keep=1 / 3), dataclasses.replace(s, saliency=None))
    assert plain.anchor.tolist() == sorted(best(scores, 2))
    assert run(litevlm.LiteVLM(keep=0.2), dataclasses.replace(s, query=s.query[:0])).anchor.tolist() == [1]


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
        new = run(dyrate.DyRate(factor=2.0), now)
        assert new.anchor.tolist() == sorted(best(attention.tolist(), len(new.anchor)))
        merged = merged.then(new)
        counts.append(len(merged.anchor))
        sets.append(set(merged.anchor.tolist()))
    assert counts == [39, 10, 10] and sets[3] <= sets[2] < sets[1] < sets[0]


def test_dyrate_keeps_the_least():
    s = Signals((1, 4, 5), saliency=torch.full((20,), 1e-6))
    assert run(dyrate.DyRate(), s).anchor.tolist() == [0, 1]
    for wrong in ({"factor": 0}, {"layer": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dyrate.DyRate(**wrong)


def test_pevlm_mask():
    frames = [(first, 2) for first in range(3, 13, 2)]
    lengths = pevlm.PEVLM(frames=2).attention_parts(frames, 17)
    assert lengths == [5, 4, 4, 4]
    part = [k for k, length in enumerate(lengths) for _ in range(length)]
    got = pevlm.mask(lengths)
    for q, k in itertools.product(range(17), range(17)):
        assert got[q, k] == (k <= q and (part[k] == 0 or part[k] == part[q] or part[q] == 3))


def test_pevlm_of_one_block_is_causal_attention():
    frames = [(first, 6) for first in range(5, 29, 6)]
    lengths = pevlm.PEVLM().attention_parts(frames, 35)
    assert torch.equal(pevlm.mask(lengths), torch.ones(35, 35).tril().bool())


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
    assert pevlm.PEVLM().budget((5, 1, 2)) == len(run(pevlm.PEVLM(), signals((5, 1, 2))).anchor)
