"""The level of `learned-adaptive`: learnt so that images keep the share on average, and counts that are told to it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.kit.reduction_data import NONE, QUESTION, TWO, encode, picture, tiny
from vlmcompress.reduction.choice import ReducerChoice, parse, same
from vlmcompress.reduction.hooks import attach, learning
from vlmcompress.reduction.methods import REGISTRY, fit_counter, learned
from vlmcompress.utils.errors import UserError

ADAPTIVE = REGISTRY.get("learned-adaptive")


def chosen(vlm, **settings) -> ReducerChoice:
    width = vlm.model.config.get_text_config().hidden_size
    weights = learned.initial(torch.zeros(width), torch.full((width,), 0.05), hidden=8, seed=1)
    return ReducerChoice("learned-adaptive", ADAPTIVE.Options(network=learned.Network(weights), **settings))


def prompts(images: int) -> list:
    """One question about each of so many pictures, of which more and more is flat, and then less again."""
    pictures = [picture(seed, (84, 84)) for seed in range(images)]
    for seed, image in enumerate(pictures):
        image.paste((90, 90, 90), (0, 0, 84, 84 * (seed % 6) // 6))
    return [([image], QUESTION) for image in pictures]


def batches(vlm, images: int) -> list[dict[str, torch.Tensor]]:
    """One prompt each, one with two images, and one without."""
    return [encode(vlm, prompt) for prompt in [*prompts(images), TWO, NONE]]


@pytest.mark.parametrize("family", ["llava", "qwen2-5-vl"])
def test_images_keep_the_share_on_average(family):
    vlm = tiny(family)
    inputs_by_batch = batches(vlm, 10)
    learnt = learning.learn(vlm, inputs_by_batch, chosen(vlm, keep=0.5))
    assert learnt.learnt and learnt.asked_for == chosen(vlm, keep=0.5) and same(learnt, chosen(vlm, keep=0.5))
    kept, shares = learning.kept(vlm, inputs_by_batch, learnt), []
    with torch.no_grad(), attach(vlm, learnt) as attached:
        for inputs in inputs_by_batch[:-1]:
            vlm.model(**inputs)
            shares += [(len(unit.reduction.anchor), len(unit.columns)) for unit in attached.seen]
    assert [count for count, _ in shares] == kept and len({count / n for count, n in shares}) > 2
    assert 0.5 - 0.5 / 12 <= sum(count / n for count, n in shares) / len(shares) <= 0.5
    assert learning.learn(vlm, [], learnt) == learnt  # nothing is left to learn


def test_nothing_to_learn_from():
    vlm = tiny("llava")
    with pytest.raises(UserError, match="the calibration data have none; name some with --calib"):
        learning.learn(vlm, [encode(vlm, NONE)], chosen(vlm))
    with pytest.raises(UserError, match=r"'learned-adaptive' has no level; `vlmcompress quantize` learns it") as caught:
        attach(vlm, chosen(vlm))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="'learned-adaptive' has no scorer"):
        attach(vlm, parse("learned-adaptive"))


def test_the_count_that_is_told_is_met():
    """The tokens are those that `learned` would keep of as many."""
    vlm = tiny("llava")
    learnt = chosen(vlm, level=0.5)
    counter = learning.counter(vlm, batches(vlm, 10), learnt)
    wide = dataclasses.replace(counter, weights=tuple(4 * weight for weight in counter.weights))
    inputs = encode(vlm, *prompts(6))
    expected = [wide.count(pixels) for pixels in inputs["pixel_values"]]
    assert len(set(expected)) > 1 and counter.buckets == tuple(range(1, 17))
    with torch.no_grad(), attach(vlm, learnt, counter=wide) as attached:
        vlm.model(**inputs)
    assert [len(unit.reduction.anchor) for unit in attached.seen] == expected
    for row, (unit, count) in enumerate(zip(attached.seen, expected, strict=True)):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        fixed = learned.Options(keep=count / 16, network=learnt.options.network)
        with torch.no_grad(), attach(vlm, "learned", fixed) as other:
            vlm.model(**alone)
        assert torch.equal(unit.reduction.anchor, other.seen[0].reduction.anchor)


def test_counts_that_do_not_go_together_are_refused():
    vlm, other = tiny("llava"), tiny("llava-next")
    counter = fit_counter([torch.rand(3, 56, 56)], [9], 14, 16)
    for wrong in ({"buckets": (4, 17)}, {"patch": 16}):
        with pytest.raises(
            UserError, match="another model's; this one's encoder makes 1 to 16 tokens of patches of 14"
        ):
            attach(vlm, chosen(vlm, level=0.5), counter=dataclasses.replace(counter, **wrong))
    with pytest.raises(UserError, match="counts are of images that are one picture, and llava-next has others"):
        attach(other, chosen(other, level=0.5), counter=counter)
    with pytest.raises(UserError, match="'learned' decides itself what it keeps"):
        attach(vlm, "learned", learned.Options(network=chosen(vlm).options.network), counter=counter)


def test_the_mean_of_the_counts_that_are_told_is_that_of_the_images():
    vlm = tiny("llava")
    inputs_by_batch = batches(vlm, 18)
    learnt = learning.learn(vlm, inputs_by_batch, chosen(vlm, keep=0.5))
    counter = learning.counter(vlm, inputs_by_batch, learnt)
    pixels = [image for inputs in inputs_by_batch[:-1] for image in inputs["pixel_values"]]
    counts = [counter.count(image) for image in pixels]
    assert sum(counts) / len(counts) == pytest.approx(
        sum(learning.kept(vlm, inputs_by_batch, learnt)) / len(counts), abs=0.5
    )
    assert json.loads(json.dumps(counter.plain()))["margin"] == -0.125
