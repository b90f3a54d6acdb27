"""DyMU's dynamic token merging: ToMe with learned thresholds, so that simple images keep fewer tokens (arXiv 2504.17040).

In each layer a pair merges when its cosine is above that layer's threshold (at most half the tokens do). `threshold`
finds the one that merges r pairs per image on average over a batch, `average` the mean over batches. How many tokens
an image keeps is known only after the encoder, unless `merge` is given a count. Matching, order and means as in
`_tome`; the layers after should attend in proportion to size, by adding `merged.sizes.log()` to the logits of the keys
(before the softmax; the published code's slow path adds it after).

The paper's virtual token unmerging is not implemented: the language model gets one row per remaining token.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Grid, Reducer, Reduction, Signals, top
from vlmcompress.reduction.methods._tome import join, match


@dataclass(frozen=True)
class DyMU(Reducer):
    """`keep`: share of the tokens kept on average, for learning; `thresholds`: one for each layer that merges, once learned.

    Or the name of a file with them, which must have been read before anything merges.
    """

    STAGE = "encoder"
    NEEDS = frozenset({"keys", "heads"})
    MERGES = True
    LEARNS = True
    COUNT = "adaptive"
    # Engines serve it to an exact count, predicted from the pixels before the encoder runs (`methods._counter`).

    keep: float = 1 / 3
    thresholds: tuple[float, ...] | str | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thresholds is not None and not isinstance(self.thresholds, str):
            object.__setattr__(self, "thresholds", tuple(self.thresholds))
            if not all(isinstance(value, int | float) and -1 <= value <= 1 for value in self.thresholds):
                raise ValueError(
                    f"thresholds must be cosines, numbers from -1 to 1, got {reprlib.repr(self.thresholds)}"
                )

    @override
    def with_thresholds(self, thresholds: tuple[float, ...] | None) -> Self:
        """The options with these thresholds; with None they have to be learned."""
        return replace(self, thresholds=thresholds)

    @override
    def budget(self, grid: Grid) -> None:
        """Return None: the number of kept tokens is not known in advance."""
        return None

    @override
    def merge_layer(self, signals: Signals, layer: int, layers: int, count: int | None = None) -> Reduction:
        """Merge the pairs whose cosine is above the layer's threshold.

        With a `count`, a layer never merges below that many tokens, and merges at least as many pairs as needed for later
        layers (each of which at most halves the tokens) to reach it. So the last layer merges exactly the excess tokens, best
        pairs first, regardless of its threshold. On an accelerator no shape then depends on how many pairs a layer merges, to
        avoid synchronizing with the device: see `_padded`.
        """
        assert signals.keys is not None and signals.heads is not None
        if self.thresholds is None or isinstance(self.thresholds, str):
            raise ValueError("dymu has no thresholds; learn them on calibration images first")
        if len(self.thresholds) != layers:
            raise ValueError(
                f"there are {len(self.thresholds)} thresholds and {layers} layers that merge: another model's"
            )
        if count is not None and not count <= signals.n <= count << (layers - layer):
            raise ValueError(f"{signals.n} tokens cannot be merged into {count} in {layers - layer} layers")
        if count is not None and signals.device.type != "cpu":
            return _padded(signals, self.thresholds[layer], count, layers - layer - 1)
        scores, partner = match(signals.keys, signals.heads)
        # DToMe: the number of pairs follows from the image, by the layer's threshold on the cosine of each edge.
        pairs = int((scores > self.thresholds[layer]).sum())
        if count is not None:
            pairs = max(min(pairs, signals.n - count), signals.n - (count << (layers - layer - 1)))
        return join(top(scores, min(pairs, signals.n // 2)), partner, signals)


def _padded(signals: Signals, threshold: float, count: int, later: int) -> Reduction:
    """The merges of a layer that is followed by `later` more, padded to the largest possible number of rows.

    Rows without tokens come last. They have size 0, so that nothing attends to them, and an arbitrary anchor. So until few
    layers remain, an encoder computes as many rows as without merging: the price of not synchronizing.
    """
    assert signals.keys is not None and signals.heads is not None
    n, device = signals.n, signals.device
    sizes = torch.ones(n, device=device) if signals.merged is None else signals.merged.sizes
    # Rows of size 0 are padding of an earlier layer.
    filled = sizes > 0
    scores, partner = match(signals.keys, signals.heads, filled)
    left = filled.sum()
    pairs = (scores > threshold).sum().minimum(left - count).maximum(left - (count << later)).minimum(left // 2)
    order = top(scores, len(scores))
    # The rank of each pair by decreasing cosine; the first `pairs` of them merge, a number that stays on the device.
    rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=device))
    parent = torch.arange(n, device=device)
    parent[::2] = torch.where(rank < pairs, partner, parent[::2])
    return Reduction.join(parent.where(filled, -1), sizes, min(n, count << later))


def schedule(n: int, count: int, layers: int) -> list[int]:
    """Number of pairs that each of `layers` merges so that `n` tokens become `count`.

    Raises ValueError where `n` is less than `count`, or where halving in each layer is not enough.
    """
    if count > n:
        raise ValueError(f"{n} tokens cannot be merged into {count}, which is more")
    if n > count << layers:
        raise ValueError(
            f"{n} tokens cannot be merged into {count} in {layers} layers, each of which merges at most half"
        )
    result = []
    for left in range(layers, 0, -1):
        # An even share of the rest, rounded up, so that the first layers merge the remainder.
        even = -(-(n - count) // left)
        # And at least as many as later layers, which can at most halve the tokens, need.
        result.append(max(even, n - (count << (left - 1))))
        n -= result[-1]
    return result


def best(signals: Signals) -> Tensor:
    """The cosines `[a]` of the possible pairs of an image in one layer, from which thresholds are learned."""
    assert signals.keys is not None and signals.heads is not None
    return match(signals.keys, signals.heads)[0]


def threshold(scores: Sequence[Tensor], r: float) -> float:
    """The threshold of one layer for a batch at which `r` pairs per image merge on average: the highest cosine not merged.

    It is never below 0, so that tokens with negative cosine never merge.

    Args:
        scores: for each image of the batch, the result of `best` in this layer.
        r: number of pairs per image, at least 0; may be a fraction.
    """
    # One threshold for the batch: all edges of all its images in one list, the r * B best of which merge.
    falling = torch.cat(list(scores)).float().sort(descending=True).values
    pairs = round(r * len(scores))
    return max(0.0, falling[pairs].item()) if pairs < len(falling) else 0.0


def average(batches: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The mean over batches of each layer's threshold, for the option `thresholds`. Raises ValueError for no batch, or for
    batches of different numbers of layers."""
    if not batches or len({len(values) for values in batches}) != 1:
        raise ValueError("thresholds are learned from at least one batch, with the same layers in each")
    return tuple(sum(column) / len(batches) for column in zip(*batches, strict=True))


REDUCER = DyMU()
