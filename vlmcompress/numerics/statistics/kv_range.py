"""Ranges of an attention module's keys and values by modality, and the errors of an FP8 cache that follow from them.

A cache in float8_e4m3 holds `x / s`, one scale `s` for all keys of a layer and one for its values; `s = max|x| / 448` clips
no calibration value. Visual keys and values have other ranges than text, and scales calibrated on text alone may be too small
for them. So each modality has a maximum and a histogram of `log2|x|`, with eight bins per octave, which give

* the share of one modality's values that lie beyond the other's maximum, to within a bin, and
* the rounding error `sum (x - fp8(x))^2 / sum x^2`: for `2^e <= x / s < 2^(e+1)` e4m3 has steps of `2^(e-3)`, and an error is
  uniform within a step, of variance `step^2 / 12`; below `2^-6` steps are `2^-9`, wider than a bin, and points are rounded.

A histogram takes 3 kB per modality, and one pass serves any scale. "Text" means prompts and answers of the same conversations,
whose tokens attend to the images; text without images may differ more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import FLOAT8_MAX
from vlmcompress.numerics.statistics.balance import MODALITIES

_LOW, _HIGH, _PER_OCTAVE = -32, 16, 8  # bins of log2|x|; values outside are in the first and last bin
BINS = (_HIGH - _LOW) * _PER_OCTAVE
_FINE = 8  # points within a bin at which the rounding error is computed


class KVRange:
    """Maxima and histograms of one attention module's keys and values, by modality.

    `ranges` is float64 `[2, 3, 1 + BINS]`: for keys and values, for each of `MODALITIES`, the maximum, then the counts.
    """

    def __init__(self) -> None:
        self.ranges = torch.zeros(2, len(MODALITIES), 1 + BINS, dtype=torch.float64)

    @torch.no_grad()
    def update(self, side: int, x: Tensor, mask: Tensor | None = None) -> None:
        """Add keys (`side` 0) or values (1).

        Args:
            x: `[batch, heads, tokens, channels]`, any float dtype.
            mask: `[batch, tokens]` modality of each token (0 ignored, 1 text, 2 vision, 3 answer); None: all are text.
        """
        size = x.transpose(1, 2).flatten(2).float().abs()  # [batch, tokens, heads * channels]
        if mask is None:
            mask = torch.ones(size.shape[:2], dtype=torch.uint8)
        mask = mask.to(x.device)
        self.ranges = self.ranges.to(x.device)
        # log2(0) is -inf and goes to the first bin; one `bincount` for all modalities synchronizes with the device only once.
        place = ((size.log2() - _LOW) * _PER_OCTAVE).clamp_(0, BINS - 1).long()
        place += mask.long()[..., None] * BINS  # one histogram after the other, first that of ignored tokens
        counts = torch.bincount(place.flatten(), minlength=(1 + len(MODALITIES)) * BINS).view(-1, BINS)[1:]
        self.ranges[side, :, 1:] += counts
        largest = size.amax(-1)
        for index in range(len(MODALITIES)):
            slot = self.ranges[side, index, 0]
            torch.maximum(slot, torch.where(mask == index + 1, largest, 0).amax().to(slot), out=slot)

    def pooled(self, total: Callable[[Tensor], Tensor], largest: Callable[[Tensor], Tensor]) -> Tensor:
        """The ranges over all workers; `total` and `largest` replace a tensor by its sum or its maximum over all workers."""
        return torch.cat([largest(self.ranges[..., :1].contiguous()), total(self.ranges[..., 1:].contiguous())], -1)


def kv_scales(ranges: Tensor) -> Tensor:
    """Scales of keys and values, float32 `[2]`, that clip none of the values in `ranges`."""
    return (ranges[..., 0].amax(1).float().clamp_min(1e-6) / FLOAT8_MAX).cpu()


def report(ranges: Tensor) -> dict[str, dict[str, Any]]:
    """Report maxima, clipping and rounding errors of keys (`k`) and values (`v`), by the modalities that occur.

    `clipped` is the share of visual values above the maximum of text and answer, and vice versa; None where one of the two is
    missing. `error` is the relative squared rounding error with the stored scale, `error_unscaled` with the scale 1, which
    engines use by default.
    """
    facts = {}
    for name, kind_ranges, scale in zip(("k", "v"), ranges.double().cpu(), kv_scales(ranges).tolist(), strict=True):
        modalities = [index for index in range(len(MODALITIES)) if kind_ranges[index, 1:].sum() > 0]
        vision = [index for index in modalities if MODALITIES[index] == "vision"]
        text = [index for index in modalities if MODALITIES[index] != "vision"]
        facts[name] = {
            "scale": scale,
            "maximum": {MODALITIES[index]: float(kind_ranges[index, 0]) for index in modalities},
            "clipped": {"vision": _clipped(kind_ranges, vision, text), "text": _clipped(kind_ranges, text, vision)},
            "error": {MODALITIES[index]: rounding_error(kind_ranges[index, 1:], scale) for index in modalities},
            "error_unscaled": {MODALITIES[index]: rounding_error(kind_ranges[index, 1:], 1.0) for index in modalities},
        }
    return facts


def rounding_error(counts: Tensor, scale: float) -> float:
    """The relative error `sum (x - fp8(x))^2 / sum x^2` for a histogram `[BINS]` and a scale; see the module."""
    inside = (torch.arange(_FINE, dtype=torch.float64) + 0.5) / _FINE
    size = torch.exp2(_LOW + (torch.arange(BINS)[:, None] + inside) / _PER_OCTAVE) / scale  # [BINS, _FINE]
    # 2^e <= x / s < 2^(e+1): three bits of mantissa make steps of 2^(e-3), whose error is uniform, of variance step^2 / 12.
    step = torch.exp2(size.log2().floor() - 3)
    small = (size * 512).round() / 512
    error = torch.where(size < 2**-6, (small - size).square(), step.square() / 12)
    # Beyond 448 the cache saturates.
    error = torch.where(size > FLOAT8_MAX, (size - FLOAT8_MAX).square(), error)
    energy = float(counts @ size.square().mean(1))
    return float(counts @ error.mean(1)) / energy if energy > 0 else 0.0


def _clipped(ranges: Tensor, whose: list[int], by: list[int]) -> float | None:
    """Share of the values of modalities `whose` above the maximum of modalities `by`, from `ranges [3, 1 + BINS]`; None if
    either has no values."""
    if not whose or not by:
        return None
    limit = float(ranges[by, 0].max())
    if float(ranges[whose, 0].max()) <= limit:
        return 0.0
    counts = ranges[whose, 1:].sum(0)
    edge = (torch.tensor(limit).log2().item() - _LOW) * _PER_OCTAVE if limit > 0 else 0.0
    above = (torch.arange(1, BINS + 1) - edge).clamp(0, 1).to(counts)  # share of each bin above the maximum
    return float(counts @ above / counts.sum())
