"""Accumulate statistics of the inputs of a group of linear layers: the hot loop of calibration.

Rows are gathered by modality until a matrix product is efficient, then read once: the Gram matrix, the sum of magnitudes and
the maxima are computed from rows in cache. Nothing here waits for an accelerator: which rows belong to which modality is
computed beforehand (`statistics.tokens`), and NaN or Inf are checked for at the end, as every sum that they enter keeps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from vlmcompress.numerics.statistics.inputs import CROSS, SAMPLE, GroupStats, add_cross, add_product
from vlmcompress.numerics.statistics.tokens import Split
from vlmcompress.numerics.statistics.tokens import split_modalities as split_by

ROWS = 2048  # rows of a modality gathered for one product
_CACHE = 2**17  # numbers processed at a time on a CPU: half a megabyte in float32


Reduce = Callable[[Tensor], Tensor]


class Collector:
    """Collects the statistics of the inputs of linear layers that share one input.

    Args:
        width: input features `in`.
        needs: which statistics to keep, a subset of {"gram", "absmax", "absmean", "cross"}.
    """

    def __init__(self, width: int, needs: Iterable[str] = ("gram",)):
        self._stats = GroupStats(width, needs)
        # [ROWS, in] of each modality, in the dtype of the inputs; [ROWS, 2 in] with the differences to the 16-bit model's
        # inputs
        self._waiting: dict[str, Tensor] = {}
        self._filled: dict[str, int] = {}

    @torch.no_grad()
    def add(self, x: Tensor, split: Split | Tensor | None = None, original: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            x: `[..., in]` inputs, any float dtype.
            split: which rows belong to which modality and which are kept in the sample, on `x`'s device; or only the modality
                of each row, `[...]` (0 ignored, 1 text, 2 vision, 3 answer), and no sample; None: all rows are text.
            original: the 16-bit model's inputs at the same tokens, shaped like `x`, for the cross-Gram matrix.
        """
        width = self._stats.width
        if x.shape[-1] != width:
            raise ValueError(f"expected inputs of {width} features, got {x.shape[-1]}")
        x = x.reshape(-1, width)
        if not isinstance(split, Split):
            split = split_by(torch.ones(len(x)) if split is None else split).to(x.device)
        if split.tokens != len(x):
            raise ValueError(f"the modality mask has {split.tokens} entries for {len(x)} tokens")
        rows = x
        if CROSS in self._stats.needs:
            if original is None or original.numel() != x.numel():
                raise ValueError("the cross-Gram matrix needs the 16-bit model's inputs at the same tokens")
            # [tokens, 2 in]: X and X' - X side by side; the difference is taken before any sum (`statistics.inputs`).
            rows = torch.cat([x, original.view_as(x) - x], 1)
        for name, index in split.rows.items():
            self._stats.count[name] += split.count[name]
            self._gather(name, rows, index)
            if "absmax" in self._stats.needs and name in split.drawn:
                places, chosen = split.drawn[name]
                kept = self._stats._rows.setdefault(name, x.new_zeros(SAMPLE, width))
                kept.index_copy_(0, places, x.index_select(0, chosen))

    @property
    def count(self) -> Mapping[str, int]:
        """Modality -> rows added so far."""
        return self._stats.count

    def finish(self) -> GroupStats:
        """The statistics of all batches. Raises ValueError for a NaN or Inf in rows that count."""
        self.settle()
        return self._trimmed()

    def pooled(self, counts: Mapping[str, int], device: torch.device, total: Reduce, largest: Reduce) -> GroupStats:
        """The statistics of all workers' batches, after `settle`; every worker calls this.

        Args:
            counts: modality -> number of rows in all workers.
            total, largest: replace a tensor by the sum, or the maximum, over all workers.
        """
        stats, width, needs = self._stats, self._stats.width, self._stats.needs

        def local(values: dict[str, Tensor], name: str, *shape: int) -> Tensor:
            return values[name] if name in values else torch.zeros(shape, device=device)

        stats.count.update(counts)
        for name in (name for name, count in counts.items() if count):
            if "gram" in needs:
                stats._gram[name] = total(local(stats._gram, name, width, width))
            if CROSS in needs:
                stats._cross[name] = total(local(stats._cross, name, width, width))
            if "absmean" in needs:
                stats._abssum[name] = total(local(stats._abssum, name, width))
            if "absmax" in needs:
                stats._absmax[name] = largest(local(stats._absmax, name, width))
                stats._rows[name] = total(local(stats._rows, name, SAMPLE, width).float())
        return self._trimmed()

    def settle(self) -> None:
        """Process the gathered rows. Raises ValueError for a NaN or Inf in rows that count."""
        stats = self._stats
        for name, rows in self._waiting.items():
            self._visit(name, rows[: self._filled[name]])
        self._waiting, self._filled = {}, {}
        # NaN and Inf propagate through sums, so a few sums of sums reveal them with a single device synchronization.
        sums = [value for kind in (stats._absmax, stats._abssum) for value in kind.values()]
        sums += [gram.diagonal() for gram in stats._gram.values()]
        sums += [cross.sum(0) for cross in stats._cross.values()]
        if sums and not torch.stack([value.sum() for value in sums]).isfinite().all():
            raise ValueError("the activations hold NaN or Inf")

    def _trimmed(self) -> GroupStats:
        stats = self._stats
        for name, rows in stats._rows.items():
            stats._rows[name] = rows[: min(SAMPLE, stats.count[name])]
        return stats

    def _gather(self, name: str, x: Tensor, index: Tensor | None) -> None:
        """Gather rows of a modality, and process them once there are `ROWS`."""
        rows = x if index is None else x.index_select(0, index)
        filled = self._filled.get(name, 0)
        while len(rows):
            if not filled and len(rows) >= ROWS:  # enough rows without gathering: no copy
                self._visit(name, rows[:ROWS])
                rows = rows[ROWS:]
                continue
            waiting = self._waiting.get(name)
            if waiting is None:
                waiting = self._waiting[name] = x.new_empty(ROWS, x.shape[1])
            fit = min(len(rows), ROWS - filled)
            waiting[filled : filled + fit].copy_(rows[:fit])
            rows, filled = rows[fit:], filled + fit
            if filled == ROWS:
                self._visit(name, waiting)
                filled = 0
        self._filled[name] = filled

    def _visit(self, name: str, rows: Tensor) -> None:
        """Add `rows [n, in]` of a modality, or `[n, 2 in]` with differences to the 16-bit model, to its statistics."""
        stats, width = self._stats, self._stats.width
        if not len(rows):
            return
        # Rows are converted to float32 once, a part at a time, and magnitudes are computed while the part is in cache. A
        # device that multiplies 16-bit numbers and accumulates in float32 needs no conversion: half the memory, the same
        # products.
        direct = rows.dtype != torch.float32 and wide_products(rows.device, rows.dtype)
        wide = rows if direct or rows.dtype == torch.float32 else rows.new_empty(rows.shape, dtype=torch.float32)
        step = max(16, _CACHE // rows.shape[1]) if rows.device.type == "cpu" else len(rows)
        for part, target in zip(rows.split(step), wide.split(step), strict=True):
            if wide is not rows:
                target.copy_(part)
            if not stats.needs & {"absmax", "absmean"}:
                continue
            size = target[:, :width].abs()
            if "absmean" in stats.needs:  # float32 sums: bfloat16's eight bits are too few for many tokens
                new, old = size.sum(0, dtype=torch.float32), stats._abssum.get(name)
                stats._abssum[name] = new if old is None else old.add_(new)
            if "absmax" in stats.needs:
                new, old = size.amax(0).float(), stats._absmax.get(name)
                stats._absmax[name] = new if old is None else torch.maximum(old, new, out=old)
        if "gram" in stats.needs:
            fresh = name not in stats._gram
            if fresh:  # not zeros: what lies below the block upper triangle stays unmapped on a CPU
                stats._gram[name] = torch.empty(width, width, device=rows.device)
            add_product(stats._gram[name], wide[:, :width], fresh=fresh)
        if CROSS in stats.needs:
            if name not in stats._cross:
                stats._cross[name] = torch.zeros(width, width, device=rows.device)
            add_cross(stats._cross[name], wide[:, :width], wide[:, width:])


@functools.cache
def wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `device` multiplies matrices of a 16-bit `dtype` and sums and returns float32."""
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    tiny = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        return bool((torch.mm(tiny, tiny, out_dtype=torch.float32) == 16).all())
    except (RuntimeError, TypeError):
        return False
