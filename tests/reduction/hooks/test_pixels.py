"""pixelprune on Qwen towers. The oracle: the full tower, in which the attention of every block hides the dropped patches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AttentionInterface, Qwen2VLImageProcessor
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.vision_utils import get_vision_window_index

from tests.kit import reference
from tests.kit.attached_cases import GREEDY, STEPS, extended, traces
from tests.kit.reduction_data import NONE, QUESTION, encode, picture, tiny
from vlmcompress.models import VLM
from vlmcompress.reduction.hooks import Reduced, attach
from vlmcompress.reduction.hooks.pixels import signals
from vlmcompress.reduction.methods import Signals, pixelprune

QWEN = ["qwen2-vl", "qwen2-5-vl", "qwen3-vl"]


def page(seed: int, size: tuple[int, int], ink: tuple[int, int, int, int]) -> Image.Image:
    """White paper with a box of noise."""
    image = Image.new("RGB", size, "white")
    image.paste(picture(seed, (ink[2] - ink[0], ink[3] - ink[1])), ink)
    return image


ONE = ([page(0, (196, 140), (64, 32, 130, 66))], QUESTION)
TWO = ([page(1, (140, 84), (0, 0, 40, 84)), page(2, (84, 224), (0, 160, 84, 180))], "which is larger?")
FLAT = ([Image.new("RGB", (140, 140), "gray")], QUESTION)
NOISE = ([picture(3)], QUESTION)


@contextmanager
def hiding(vlm: VLM, inputs: dict[str, torch.Tensor], units: list[Reduced]) -> Iterator[None]:
    """The tower takes all patches, and none can see a dropped one (but that one itself)."""
    tower: Any = vlm.model.get_submodule("model.visual")
    grid, merge = inputs["image_grid_thw"], tower.spatial_merge_size
    kept = torch.cat([unit.reduction.target >= 0 for unit in units])
    if hasattr(tower, "window_size"):
        order, _ = get_vision_window_index(grid, merge, tower.window_size, tower.patch_size)
        kept = kept[order]
    kept = kept.repeat_interleave(merge**2)
    start = 0

    def begin(*_: object) -> None:
        nonlocal start
        start = 0

    def attend(module, query, key, value, attention_mask, **kwargs):
        nonlocal start
        visible = kept[start : start + key.shape[2]]
        start += key.shape[2]
        mask = (visible | torch.eye(len(visible)).bool())[None, None]
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("hiding", attend)
    hooks = [block.attn.register_forward_pre_hook(begin) for block in tower.blocks]
    tower.config._attn_implementation = "hiding"
    try:
        yield
    finally:
        tower.config._attn_implementation = "sdpa"
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("prompts", [(ONE, TWO, NONE), (FLAT, NOISE)], ids=["pages", "extremes"])
def test_equals_hiding_the_dropped_patches(family, prompts):
    vlm = tiny(family)
    inputs = encode(vlm, *prompts)
    rows = []
    hook = vlm.model.model.visual.blocks[0].register_forward_hook(lambda module, args, out: rows.append(len(out)))
    with attach(vlm, "pixelprune") as attached:
        reduced = vlm.model(**inputs).logits
    hook.remove()
    kept = [len(unit.reduction.anchor) for unit in attached.seen]
    tokens = [len(unit.columns) for unit in attached.seen]
    assert rows == [4 * sum(kept)] and sum(kept) < 0.7 * sum(tokens)
    assert prompts[0] is ONE or kept == [1, tokens[1]]
    with hiding(vlm, inputs, attached.seen):
        full = reference.logits(vlm, inputs, attached.stages)
    reference.compare(reduced, full, inputs["attention_mask"], attached.seen)
    if prompts[0] is ONE:  # a tower that sees all patches gives something else, unless they are all alike
        seeing = reference.logits(vlm, inputs, attached.stages)
        assert (seeing[:, -1] - full[:, -1]).abs().max() > 1e-4


@pytest.mark.parametrize("family", QWEN)
def test_generated_tokens_equal_the_full_recompute(family):
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO, NONE)
    with attach(vlm, "pixelprune") as attached:
        out = vlm.model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)
    with hiding(vlm, inputs, attached.seen):
        full = reference.logits(vlm, extended(inputs, out.sequences[:, -STEPS:]), attached.stages)
    torch.testing.assert_close(torch.stack(out.logits, 1).double(), full[:, -STEPS - 1 : -1], atol=2e-5, rtol=1e-4)
    kept = int(reference.hidden_mask(inputs["attention_mask"], attached.seen).sum(1).max())
    assert {part.keys.shape[2] for part in out.past_key_values.layers} == {kept + STEPS - 1}


@pytest.mark.parametrize("family", QWEN)
def test_without_repeats_no_bit_changes(family):
    vlm = tiny(family)
    inputs, words = encode(vlm, NOISE, ([picture(4, (140, 84)), picture(5)], "and these?")), encode(vlm, NONE)
    before, plain, text = traces(vlm.model), vlm.model(**inputs).logits, vlm.model(**words).logits
    with attach(vlm, "pixelprune") as attached:
        assert torch.equal(vlm.model(**inputs).logits, plain)
        assert all(len(unit.reduction.anchor) == len(unit.columns) for unit in attached.seen)
        assert torch.equal(vlm.model(**words).logits, text)
        vlm.model(**encode(vlm, ONE))
    assert traces(vlm.model) == before
    assert torch.equal(vlm.model(**inputs).logits, plain)


def test_the_tolerance_is_in_levels():
    """Paper that is off by two levels here and there goes with a tolerance of 2 only. bfloat16 tells these apart."""
    vlm = tiny("qwen2-5-vl")
    image = Image.new("RGB", (140, 140), (200, 100, 50))
    for x in range(28, 140, 56):
        image.paste((202, 98, 51), (x, 0, x + 28, 140))
    inputs = encode(vlm, ([image], QUESTION))
    kept = {}
    for tolerance in (0, 1, 2):
        with attach(vlm, "pixelprune", {"tolerance": tolerance}) as attached:
            vlm.model(**inputs)
        kept[tolerance] = len(attached.images()[0].anchor)
    assert kept == {0: 5, 1: 5, 2: 1}
    exact, rounded = (
        signals(vlm.processor.image_processor, inputs["pixel_values"].to(dtype), inputs["image_grid_thw"])[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert isinstance(exact, Signals) and torch.equal(exact.pixels, rounded.pixels)
    assert pixelprune.reduce(rounded, pixelprune.Options()).anchor.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("mean", "std", "wrong"),
    [([0.5] * 3, [0.5] * 3, set()), (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, {(253, 2, 254)})],
    ids=["half", "clip"],
)
def test_levels_of_normalized_pixels(mean, std, wrong):
    """Each of 256 grey levels is a token. All come back, but for one level of one channel in bfloat16."""
    size = {"shortest_edge": 28**2, "longest_edge": 448**2}
    images_of = Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=size, image_mean=mean, image_std=std)
    image = Image.new("RGB", (16 * 28, 16 * 28))
    for level in range(256):
        x, y = level % 16 * 28, level // 16 * 28
        image.paste((level,) * 3, (x, y, x + 28, y + 28))
    inputs = images_of(images=[image], return_tensors="pt")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        (image_signals,) = signals(images_of, inputs["pixel_values"].to(dtype), inputs["image_grid_thw"])
        pixels = image_signals.pixels.reshape(256, 4, 3, -1).amax((1, 3))  # of a token's patches
        assert torch.equal(pixels, image_signals.pixels.reshape(256, 4, 3, -1).amin((1, 3)))
        levels = torch.arange(256.0)[:, None].expand(-1, 3)
        off = {
            (level, channel, int(pixels[level, channel])) for level, channel in (pixels != levels).nonzero().tolist()
        }
        assert off == (wrong if dtype == torch.bfloat16 else set())
