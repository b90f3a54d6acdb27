"""What a visual-token reducer costs and what it saves, in transformers on one GPU, at the widths of Qwen2.5-VL-7B.

A reducer that takes longer than the prefill it saves is no gain. `next_to_encoder` holds each against the encoder's time for
the same images, `prefill` runs the model with all, half and a quarter of an image's 1,280 tokens.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch

from gpu import shapes
from gpu.bare import made, measure
from gpu.bare.equal import checked, each
from gpu.part import Place

SHAPE = "qwen2.5-vl-7b"
GRID, TINY_GRID = (1, 32, 40), (1, 8, 8)
IMAGES = (1, 8, 32)
SHARES = (1.0, 0.5, 0.25)
ATTACHED = ("uniform", "coverage", "divprune")
WORDS = 48


@torch.no_grad()
def next_to_encoder(place: Place) -> dict[str, Any]:
    """The encoder's milliseconds for some images, and each reducer's, with its kernels and waits for one of them.

    A reducer that chooses in Triton kernels is timed without them as well.
    """
    from vlmcompress.reduction.methods import REGISTRY, _selecting, reduce_all

    vlm, device, grid = shapes.vlm(place, SHAPE, "tower"), measure.device(), TINY_GRID if place.tiny else GRID
    width, encoder = vlm.model.config.text_config.hidden_size, {}
    for count in IMAGES[: 2 if place.tiny else 3]:
        inputs = prompts(vlm, grid, count)
        pixels, sizes = inputs["pixel_values"], inputs["image_grid_thw"]
        encoder[count] = 1000 * measure.seconds(lambda: vlm.model.get_image_features(pixels, sizes), 3)  # noqa: B023
    images = [made.signals(grid, width, device, seed) for seed in range(4)]

    def row(name: str) -> dict[str, Any]:
        reducer = made.reducer(name, width)

        def call(count: int) -> None:
            batch = [images[number % len(images)] for number in range(count)]
            if not reducer.MERGES:
                reduce_all(reducer, batch, check=False)  # as vLLM's plugin does: all images of a call at once
            else:
                for image in batch:
                    made.reduced(reducer, image)

        def milliseconds() -> dict[int, float]:
            return {count: round(1000 * measure.seconds(lambda: call(count), 3), 3) for count in encoder}  # noqa: B023

        _selecting.kernels.cache_clear()
        figures = measure.counts(lambda: call(1)) | {
            "stage": reducer.STAGE,
            "served": reducer.SERVED,
            "ms": milliseconds(),
        }
        if _selecting.kernels.cache_info().currsize:  # it has asked for kernels
            with patch.dict(os.environ, {_selecting.SWITCH: "0"}):
                _selecting.kernels.cache_clear()
                figures["torch_ms"] = milliseconds()
            _selecting.kernels.cache_clear()
        return figures

    rows = each(REGISTRY.names(), row)
    tokens = grid[0] * grid[1] * grid[2]
    result = {"tokens": tokens, "encoder_ms": {n: round(ms, 3) for n, ms in encoder.items()}, "reducers": rows}
    return checked(rows, result)


@torch.no_grad()
def prefill(place: Place) -> dict[str, Any]:
    """Milliseconds of the decoder alone at each share of the tokens, and of the whole model with some reducers."""
    from vlmcompress.reduction.hooks import attach

    vlm, grid = shapes.vlm(place, SHAPE, "full"), TINY_GRID if place.tiny else GRID
    tokens, hidden = grid[0] * grid[1] * grid[2], vlm.model.config.text_config.hidden_size
    decoder = vlm.model.model.language_model

    def row(name: str) -> dict[str, Any]:
        count = int(name.split()[0])
        inputs = prompts(vlm, grid, count)
        figures: dict[str, dict[Any, float]] = {"decoder_ms": {}, "model_ms": {}}
        for share in SHARES:
            x = torch.randn(count, round(share * tokens) + WORDS, hidden, device=measure.device()).to(vlm.model.dtype)
            taken = measure.seconds(lambda: decoder(inputs_embeds=x, use_cache=True), 3)  # noqa: B023
            figures["decoder_ms"][share] = round(1000 * taken, 2)
        whole = measure.seconds(lambda: vlm.model(**inputs, use_cache=True, logits_to_keep=1), 3)
        figures["model_ms"]["all"] = round(1000 * whole, 2)
        for reduce in (f"{method}:{share}" for method in ATTACHED for share in SHARES[1:]):
            method, kept = reduce.split(":")
            with attach(vlm, method, {"keep": float(kept)}):
                taken = measure.seconds(lambda: vlm.model(**inputs, use_cache=True, logits_to_keep=1), 3)
            figures["model_ms"][reduce] = round(1000 * taken, 2)
        return figures

    rows = each([f"{count} images" for count in IMAGES[: 1 if place.tiny else 2]], row)
    return checked(rows, {"tokens": tokens, **rows, **measure.peaks()})


def prompts(vlm: Any, grid: tuple[int, int, int], count: int) -> dict[str, torch.Tensor]:
    """Inputs of some prompts, each of an image of noise with a grid of tokens, and a question of random tokens."""
    config, draw, device = vlm.model.config, torch.Generator().manual_seed(0), measure.device()
    vision, (frames, down, across) = config.vision_config, grid
    merge = vision.spatial_merge_size
    tokens = frames * down * across
    image = torch.full((count, tokens), getattr(config, vlm.spec.image_token))
    ids = torch.cat([image, torch.randint(0, 256, (count, WORDS), generator=draw)], 1)
    patches = count * tokens * merge**2
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(patches, width, generator=draw).to(vlm.model.dtype),
        "image_grid_thw": torch.tensor([[frames, down * merge, across * merge]] * count),
        "mm_token_type_ids": (ids == image[0, 0]).long(),
    }
    return {name: value.to(device) for name, value in inputs.items()}
