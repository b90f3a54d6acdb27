"""The first layers run ahead tell a surrogate what the model itself tells where a prompt is just an image and words."""

from __future__ import annotations

import pytest
import torch

from tests.kit.attached_cases import DENSE, recorded
from tests.kit.reduction_data import ONE, encode, tiny
from vlmcompress.hf_hooks import attach, refusal

pytestmark = pytest.mark.representatives

FAMILIES = [
    spec.family for spec in DENSE if spec.visual_grid in ("patches", "thw") and refusal(spec, "surrogate") is None
]
RULES = {"fastv": "fastv", "dart": "dart-llm"}


def bare(vlm) -> dict[str, torch.Tensor]:
    """A prompt that is an image and, behind it, words."""
    inputs = encode(vlm, ONE)
    ids = inputs["input_ids"]
    image = (ids[0] == getattr(vlm.model.config, vlm.spec.image_token)).nonzero()
    order = torch.cat([image, (ids[0] < 256).nonzero()]).squeeze(1)  # bytes; above are special tokens
    return {name: value[:, order] if value.shape == ids.shape else value for name, value in inputs.items()}


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_keeps_what_the_original_keeps(family, rule, layer, monkeypatch):
    """Oracle: the method within the language model, with positions, masks and deepstack of the model itself."""
    vlm = tiny(family)
    inputs, calls = bare(vlm), recorded(monkeypatch)
    with attach(vlm, RULES[rule], {"keep": 0.4, "layer": layer}) as attached:
        vlm.model(**inputs)
        (original,) = attached.seen
    with attach(vlm, "surrogate", {"keep": 0.4, "layer": layer, "rule": rule}) as attached:
        vlm.model(**inputs)
        (surrogate,) = attached.seen
    expected, ahead = calls[0], calls[1].ahead
    torch.testing.assert_close(ahead.saliency, expected.saliency)
    torch.testing.assert_close(ahead.keys, expected.keys)
    if rule == "dart":
        for name in ("features", "query", "query_keys"):
            torch.testing.assert_close(getattr(ahead, name), getattr(expected, name))
    assert torch.equal(surrogate.reduction.anchor, original.reduction.anchor)


def test_an_image_is_seen_alone():
    """The same image twice in a prompt keeps the same tokens; one that is within the language model sees the first, too."""
    vlm = tiny("qwen2-5-vl")
    pictures, question = ONE
    with attach(vlm, "surrogate", {"keep": 0.4}) as attached:
        vlm.model(**encode(vlm, (pictures + pictures, question)))
    first, second = (unit.reduction.anchor for unit in attached.seen)
    assert torch.equal(first, second)


def test_leaves_the_model_as_it_was():
    vlm = tiny("llava")
    inputs = encode(vlm, ONE)
    before = vlm.model(**inputs).logits
    with attach(vlm, "surrogate", {"keep": 0.4}):
        vlm.model(**inputs)
    assert torch.equal(vlm.model(**inputs).logits, before)
