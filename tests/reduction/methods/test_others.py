"""The choice among views, against its definition written as loops."""

from __future__ import annotations

import dataclasses

import pytest

from tests.kit.reducer_data import best, cosine, run, signals
from vlmcompress.reduction.methods import litevlm


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
