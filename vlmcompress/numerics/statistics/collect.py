"""Accumulate statistics of the inputs of a group of linear layers: the hot loop of calibration.

Rows are gathered by modality until a matrix product is efficient; where there are fewer, they are not multiplied before a sum
is read (`statistics.inputs`). Nothing here waits for an accelerator: which rows belong to which modality is computed
beforehand (`statistics.tokens`), and NaN or Inf are checked for at the end, as every sum that they enter keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from vlmcompress.numerics.statistics.inputs import ROWS, SAMPLE, GroupStats, add_product
from vlmcompress.numerics.statistics.tokens import Split
from vlmcompress.numerics.statistics.tokens import split_modalities as split_by

_CACHE = 2**17  # numbers processed at a time on a CPU: half a megabyte in float32


Reduce = Callable[[Tensor], Tensor]


class Collector:
    """Collects the statistics of the inputs of linear layers that share one input.

    Args:
        width: input features `in`.
        needs: which statistics to keep, a subset of `STATISTICS`.
    """

    def __init__(self, width: int, needs: Iterable[str] = ("gram",)):
        self._stats = GroupStats(width, needs)
        self._waiting: dict[str, Tensor] = {}  # [ROWS, in] of each modality, in the dtype of the inputs
        self._filled: dict[str, int] = {}
        self._norms: Tensor | float = 0.0  # a sum of norms of rows, finite if all rows are

    @torch.no_grad()
    def add(self, x: Tensor, split: Split | Tensor | None = None) -> None:
        """Add a batch.

        Args:
            x: `[..., in]` inputs, any float dtype.
            split: which rows belong to which modality and which are kept in the sample, on `x`'s device; or only the modality
                of each row, `[...]` (0 ignored, 1 text, 2 vision, 3 answer), and no sample; None: all rows are text.
        """
        width = self._stats.width
        if x.shape[-1] != width:
            raise ValueError(f"expected inputs of {width} features, got {x.shape[-1]}")
        x = x.reshape(-1, width)
        if not isinstance(split, Split):
            split = split_by(torch.ones(len(x)) if split is None else split).to(x.device)
        if split.tokens != len(x):
            raise ValueError(f"the modality mask has {split.tokens} entries for {len(x)} tokens")
        for name, index in split.rows.items():
            self._stats.count[name] += split.count[name]
            self._gather(name, x, index)
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

    def pooled(
        self, counts: Mapping[str, int], workers: int, device: torch.device, total: Reduce, largest: Reduce
    ) -> GroupStats:
        """The statistics of all workers' batches, after `settle`; every worker calls this.

        Args:
            counts: modality -> number of rows in all workers.
            workers: number of workers; only rows of a single one may stay unmultiplied.
            total, largest: replace a tensor by the sum, or the maximum, over all workers.
        """
        stats, width, needs = self._stats, self._stats.width, self._stats.needs

        def local(values: dict[str, Tensor], name: str, *shape: int) -> Tensor:
            return values[name] if name in values else torch.zeros(shape, device=device)

        stats.count.update(counts)
        for name, rows in [*stats._pending.items()] if workers > 1 else ():
            self._multiply(name, rows)
            del stats._pending[name]
        for name in (name for name, count in counts.items() if count):
            if "gram" in needs and name not in stats._pending:
                stats._gram[name] = total(local(stats._gram, name, width, width))
            if "absmean" in needs:
                stats._abssum[name] = total(local(stats._abssum, name, width))
            if "absmax" in needs:
                stats._absmax[name] = largest(local(stats._absmax, name, width))
                stats._rows[name] = total(local(stats._rows, name, SAMPLE, width).float())
        return self._trimmed()

    def settle(self) -> None:
        """Process the gathered rows. Raises ValueError for a NaN or Inf in rows that count."""
        for name, filled in self._filled.items():
            if filled:
                rows = self._waiting[name][:filled]
                self._measure(name, rows)
                if name in self._stats._gram:
                    self._multiply(name, rows)
                elif "gram" in self._stats.needs:
                    self._stats._pending[name] = rows
        self._waiting, self._filled = {}, {}
        # A single device synchronization.
        if not torch.as_tensor(self._norms).isfinite():
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
                self._measure(name, rows[:ROWS])
                self._multiply(name, rows[:ROWS])
                rows = rows[ROWS:]
                continue
            waiting = self._waiting.get(name)
            if waiting is None:
                waiting = self._waiting[name] = x.new_empty(ROWS, x.shape[1])
            fit = min(len(rows), ROWS - filled)
            waiting[filled : filled + fit].copy_(rows[:fit])
            rows, filled = rows[fit:], filled + fit
            if filled == ROWS:
                self._measure(name, waiting)
                self._multiply(name, waiting)
                filled = 0
        self._filled[name] = filled

    def _measure(self, name: str, rows: Tensor) -> None:
        """Add the magnitudes of `rows` of a modality, `[n, in]`."""
        stats, cpu = self._stats, rows.device.type == "cpu"
        # On a CPU a part at a time, which stays in cache as float32.
        for part in rows.split(max(16, _CACHE // rows.shape[1]) if cpu else ROWS):
            part = part.float() if cpu else part
            self._norms = self._norms + torch.linalg.vector_norm(part, dtype=torch.float32)
            if not stats.needs & {"absmax", "absmean"}:
                continue
            size = part.abs()
            if "absmean" in stats.needs:  # float32 sums: bfloat16's eight bits are too few for many tokens
                new, old = size.sum(0, dtype=torch.float32), stats._abssum.get(name)
                stats._abssum[name] = new if old is None else old.add_(new)
            if "absmax" in stats.needs:
                new, old = size.amax(0).float(), stats._absmax.get(name)
                stats._absmax[name] = new if old is None else torch.maximum(old, new, out=old)

    def _multiply(self, name: str, rows: Tensor) -> None:
        """Add products of rows, as in `_measure`, to the sums of a modality."""
        stats, width = self._stats, self._stats.width
        if "gram" in stats.needs:
            fresh = name not in stats._gram
            if fresh:  # not zeros: what lies below the block upper triangle stays unmapped on a CPU
                stats._gram[name] = torch.empty(width, width, device=rows.device)
            add_product(stats._gram[name], rows, fresh=fresh)
