"""PixelPrune against a coder and a decoder that go unit by unit, and what must hold of flat, noisy and drawn pictures."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Qwen2VLImageProcessor

from vlmcompress.evaluation.accuracy import pages
from vlmcompress.reduction.hooks.pixels import unit_pixels
from vlmcompress.reduction.methods import Signals, reduce
from vlmcompress.reduction.methods.pixelprune import PixelPrune

GRIDS = [(1, 6, 8), (1, 1, 7), (1, 7, 1), (2, 4, 5), (1, 1, 1)]
THRESHOLDS = [0.0, 0.1, 0.3]


def drawn(grid, seed: int, steps: int = 3) -> torch.Tensor:
    """Units `[n, 4]` of few colors, in runs, with small differences."""
    draw = torch.Generator().manual_seed(seed)
    colors = torch.rand(steps, 4, generator=draw)
    units = colors[torch.randint(steps, (math.prod(grid),), generator=draw)]
    units = torch.where(torch.rand(len(units), 1, generator=draw) < 0.6, units.roll(1, 0), units)
    return units + torch.randint(4, units.shape, generator=draw) * 0.04


def kept(grid, pixels, threshold: float) -> list[int]:
    return reduce(PixelPrune(threshold=threshold), Signals(grid, pixels=pixels)).anchor.tolist()


def predicted(restored: dict, row: int, column: int, threshold: float):
    """The prediction of a unit by what is sent of those before it; None for the first."""
    left, above, corner = (
        restored.get((row, column - 1)),
        restored.get((row - 1, column)),
        restored.get((row - 1, column - 1)),
    )
    if left is None or above is None:
        return above if left is None else left
    return above if apart(left, corner) <= threshold else left


def apart(first, second) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_what_is_kept_is_what_a_coder_sends(grid, threshold):
    frames, rows, columns = grid
    for seed in range(8):
        pixels, expected = drawn(grid, seed), []
        for frame in range(frames):
            restored: dict = {}
            for row in range(rows):
                for column in range(columns):
                    number = (frame * rows + row) * columns + column
                    unit = pixels[number].tolist()
                    guess = predicted(restored, row, column, threshold)
                    if guess is None or (pixels[number] - torch.tensor(guess)).abs().max() > threshold:
                        expected.append(number)
                        guess = unit
                    restored[row, column] = guess
        assert kept(grid, pixels, threshold) == expected


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_decoder_restores_the_picture(threshold):
    """From the kept units alone: exactly at 0, else within the threshold, however long the chain of predictions."""
    grid = (1, 9, 11)
    shares = []
    for seed in range(8):
        pixels = drawn(grid, seed)
        sent = set(kept(grid, pixels, threshold))
        shares.append(len(sent) / len(pixels))
        restored: dict = {}
        for number in range(99):
            place = divmod(number, 11)
            restored[place] = pixels[number].tolist() if number in sent else predicted(restored, *place, threshold)
            assert apart(restored[place], pixels[number].tolist()) <= threshold + 1e-6
    assert min(shares) < 1


def test_errors_do_not_add_up():
    ramp = torch.arange(20.0)[:, None].expand(20, 3) / 100
    assert kept((1, 1, 20), ramp, 0.0) == [*range(20)]
    assert kept((1, 1, 20), ramp, 0.035) == [0, 4, 8, 12, 16]


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_flat_frame_keeps_one_unit_and_noise_all(threshold):
    grid = (2, 5, 6)
    flat = torch.tensor([0.2, 0.7])[:, None, None].expand(2, 30, 48).flatten(0, 1)
    assert kept(grid, flat, threshold) == [0, 30]
    noise = torch.rand(60, 192, generator=torch.Generator().manual_seed(0))
    assert kept(grid, noise, threshold) == [*range(60)]


def test_margins_go_and_text_stays():
    """Of drawn pages: fewer tokens at a higher threshold, none with ink lost at 0."""
    # Its own default follows the last `max_pixels` that any processor of the class got: transformers changes one dict.
    processor = Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
    for family in ("paragraphs", "table"):
        made = processor([pages.draw(family, 0)], return_tensors="pt")
        frames, rows, columns = made["image_grid_thw"][0].tolist()
        grid = frames, rows // 2, columns // 2
        (pixels,) = unit_pixels(made["pixel_values"], [grid], True, processor)
        counts = [len(kept(grid, pixels, threshold)) for threshold in (0.0, 0.02, 0.1, 0.4, 1.0)]
        assert counts == sorted(counts, reverse=True) and counts[0] < math.prod(grid) and counts[-1] == 1
        inked = (pixels.amax(1) - pixels.amin(1) > 0.5).nonzero().flatten().tolist()
        left = kept(grid, pixels, 0.0)
        units = {tuple(pixels[number].tolist()) for number in left}
        assert len(inked) > 20 and all(tuple(pixels[number].tolist()) in units for number in inked)


@pytest.mark.parametrize("threshold", [-0.1, 1.5, True, "half", None, math.nan])
def test_a_threshold_beyond_colors_is_refused(threshold):
    with pytest.raises(ValueError, match="threshold must be a number from 0 to 1, got"):
        PixelPrune(threshold=threshold)
