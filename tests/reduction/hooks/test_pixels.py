"""Pixels of visual tokens are those of the part of the image that the layout says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit.attached_cases import DENSE, recorded
from tests.kit.reduction_data import QUESTION, encode, tiny
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.hooks.pixels import unit_pixels
from vlmcompress.reduction.support import family_problem, served
from vlmcompress.utils.errors import UserError

WITH = [spec.family for spec in DENSE if family_problem(spec, "pixelprune") is None]


def ramps(width: int, height: int) -> Image.Image:
    """An image whose red grows to the right and green downwards: a mean color says where it comes from."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([red, green, 255 - red], -1).astype(np.uint8))


@pytest.mark.parametrize("family", WITH)
def test_pixels_of_a_token_come_from_its_place(family, monkeypatch):
    """Oracle: the mean color of the box that the layout gives, in the image itself."""
    vlm, image = tiny(family), ramps(168, 112)
    calls = recorded(monkeypatch)
    with attach(vlm, "pixelprune") as attached:
        vlm.model(**encode(vlm, ([image], QUESTION)))
    layout = vlm.spec.layout(vlm.processor, image.width, image.height, 1)
    boxes = [box for box in layout.cells() if box]
    offset = torch.tensor(vlm.processor.image_processor.image_mean)
    scale, place = np.asarray(image) / 255, 0
    for signals in calls:
        values = signals.pixels.double().unflatten(1, (-1, 3, signals.pixels.shape[1] // 3 // parts(vlm)))
        for mean in (values.mean((1, 3)) + offset).tolist():
            left, top, right, bottom = boxes[place]
            inside = scale[max(0, round(top)) : round(bottom), max(0, round(left)) : round(right)].mean((0, 1))
            assert np.allclose(mean, inside, atol=0.05), (family, place)
            place += 1
    assert place == len(boxes) == sum(len(reduction.target) for reduction in attached.images())


def parts(vlm) -> int:
    """How many patches of a token come one after the other, each with its channels."""
    return vlm.model.config.vision_config.spatial_merge_size**2 if vlm.spec.images.grid == "thw" else 1


@pytest.mark.parametrize("packed", [True, False])
def test_levels_are_as_normalized_values(packed):
    """Levels from 0 to 255, which vLLM normalizes on the device, give the same bits."""
    kind = SimpleNamespace(do_normalize=True, image_mean=[0.48, 0.46, 0.41], image_std=[0.27, 0.26, 0.28])
    levels = torch.randint(256, (8, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (255 * torch.tensor(values)[:, None, None] for values in (kind.image_mean, kind.image_std))
    normalized = (levels.float() - mean) / std
    grids = [(1, 2, 4)] if packed else [(1, 2, 2)] * 8
    if packed:
        levels, normalized = levels.flatten(1), normalized.flatten(1)
    raw = [*unit_pixels(levels, grids, packed, SimpleNamespace(**vars(kind) | {"do_normalize": False}))]
    assert len(raw) == len(grids)
    for units, expected in zip(raw, unit_pixels(normalized, grids, packed, kind), strict=True):
        assert torch.equal(units, expected) and units.shape[0] == grids[0][1] * grids[0][2]
        assert (units.amax() - units.amin()).item() == pytest.approx(1, abs=0.3)


def test_padding_and_crops_after_the_encoder_are_refused():
    with pytest.raises(UserError, match="compares the pixels of visual tokens, and llava-next crops or pads them"):
        attach(tiny("llava-next"), "pixelprune")


def test_where_engines_serve_it():
    assert {"llava", "qwen2-5-vl", "qwen3-vl", "internvl", "smolvlm"} <= {*served("pixelprune")}
    assert not {"llava-next", "llava-onevision"} & {*served("pixelprune")}


def test_answers_are_those_of_the_kept_tokens_alone():
    """Of a picture that is half flat: some tokens go, in all of the two images their own number."""
    vlm = tiny("qwen2-vl")
    flat = np.asarray(ramps(168, 112)).copy()
    flat[:, 84:] = 90
    with attach(vlm, parse_reducer("pixelprune:threshold=0.01")) as attached:
        vlm.model(**encode(vlm, ([Image.fromarray(flat), ramps(112, 84)], QUESTION)))
    half, full = attached.images()
    assert len(full.anchor) == len(full.target) and len(half.target) / 2 <= len(half.anchor) < len(half.target)
