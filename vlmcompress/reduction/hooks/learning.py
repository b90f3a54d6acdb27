"""Learn, from images, DyMU's thresholds and a predictor of the number of tokens that an image keeps.

For DyMU, images go through the encoder in batches of 64. In each layer a batch's threshold is set so that it merges the
scheduled number of pairs, which over all layers leaves a share `keep` of the tokens (`dymu.schedule`); the next layer gets the
merged rows, and the result are mean thresholds over all batches. So images keep `keep` of their tokens on average, simple ones
fewer. Families that cut images into tiles learn from the tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmcompress.models import VLM, patch_side
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks._merging import EncoderHooks, M, merger_of, pictures
from vlmcompress.reduction.methods import Grid, Merger, Reducer, TokenCounter, dymu, fit_counter, share
from vlmcompress.reduction.support import count_bounds
from vlmcompress.reduction.threshold_file import load_thresholds, tower
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, silent

BATCH = 64
NO_IMAGES = "thresholds are learned from images, and the calibration data have none; name some with --calib"


class _Learning(Merger):
    """Merger that merges in each layer by the batch's own threshold, and stores these thresholds."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.thresholds: list[float] = []
        assert self.reducer.keep is not None
        self._pairs = _schedule(self.grids[0], self.reducer.keep, self.layers)

    def merge(self, layer: int, states: Tensor, keys: Tensor, heads: int) -> Tensor:
        scores = [dymu.best(self.signals(image, keys, heads)) for image in range(len(self.merged))]
        # A batch merges by its own threshold, as later layers see the result.
        self.thresholds.append(dymu.threshold(scores, self._pairs[layer]))
        rest = (1.0,) * (self.layers - len(self.thresholds))
        self.reducer = self.reducer.with_thresholds((*self.thresholds, *rest))
        return super().merge(layer, states, keys, heads)


@torch.no_grad()
def learn_thresholds(
    vlm: VLM, batches: Sequence[Mapping[str, Tensor]], chosen: ReducerChoice, progress: Progress = silent
) -> ReducerChoice:
    """Return the reducer with thresholds for this model, learned from the images of `batches` if it has none.

    Args:
        batches: inputs from the model's processor; those without images are left out.
        chosen: a method with learned thresholds; if it names a file of thresholds, that is read instead. Its scorer's file, if
            any, must have been read.
    """
    chosen = load_thresholds(vlm, chosen)
    if chosen.reducer.thresholds is not None:
        return chosen
    levels = []
    for part, parts in _pictures(vlm, batches):
        levels.append(_run(vlm, part, chosen.reducer, _Learning).thresholds)
        progress("thresholds", len(levels), parts)
    return chosen.with_thresholds(dymu.average(levels))


@torch.no_grad()
def count_kept(vlm: VLM, batches: Sequence[Mapping[str, Tensor]], chosen: ReducerChoice) -> list[int]:
    """Count the tokens that each picture (image or tile) of `batches` keeps, in order. `chosen` has its thresholds."""
    return [
        len(reduction.anchor)
        for part, _parts in _pictures(vlm, batches)
        for reduction in _run(vlm, part, chosen.reducer, Merger).merged
    ]


def counter(vlm: VLM, batches: Sequence[Mapping[str, Tensor]], chosen: ReducerChoice) -> TokenCounter:
    """Fit a counter, which computes from pixels how many tokens a picture keeps, to the pictures of `batches`."""
    images = [picture for inputs in batches if inputs.get("pixel_values") is not None for picture in pictures(inputs)]
    least, tokens = count_bounds(vlm.model.config, chosen.reducer)
    return fit_counter(images, count_kept(vlm, batches, chosen), patch_side(vlm.model.config), tokens, least)


def _schedule(grid: Grid, keep: float, layers: int) -> list[int]:
    try:
        return dymu.schedule(math.prod(grid), share(grid, keep), layers)
    except ValueError as error:
        raise UserError(f"keep={keep:g}: {error}; choose a larger share") from error


def _pictures(vlm: VLM, batches: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[Tensor, int]]:
    """Yield the encoder's inputs of all batches in parts of at most `BATCH`, each with the number of parts.

    A part is `[images, 3, height, width]`, in the model's dtype and on its device. All but the last have the same length;
    memory holds one part and the inputs of one batch.
    """
    with_images = [inputs for inputs in batches if inputs.get("pixel_values") is not None]
    count = sum(len(pictures(inputs)) for inputs in with_images)
    if not count:
        raise UserError(NO_IMAGES)
    parts = math.ceil(count / BATCH)
    size, waiting = math.ceil(count / parts), torch.empty(0)
    for number, inputs in enumerate(with_images, start=1):
        added = pictures(inputs).to(vlm.model.dtype)
        waiting = torch.cat([waiting, added]) if len(waiting) else added
        while len(waiting) >= size or (number == len(with_images) and len(waiting)):
            part, waiting = waiting[:size], waiting[size:]
            yield part.to(vlm.model.device), math.ceil(count / size)


def _run(vlm: VLM, pixels: Tensor, reducer: Reducer, kind: type[M]) -> M:
    """Run the encoder on pictures `[images, 3, height, width]` with merging; returns the merger."""
    layers = EncoderHooks(vlm, lambda states: merger_of(vlm, states, pixels, reducer, kind))
    try:
        tower(vlm)(pixels)
    finally:
        layers.remove()
    assert isinstance(layers.merger, kind)
    return layers.merger
