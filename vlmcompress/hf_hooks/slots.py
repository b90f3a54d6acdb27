"""Slots: the columns of a batch's sequences that are left, and the reduction of tensors to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots that are left of a batch of sequences.

    columns: `[b, m]` int64, the column of the full sequence that each slot holds, ascending among the valid ones.
    valid:   `[b, m]` bool, false for padding (whose column is any that was dropped).
    length:  columns of the full sequences, padding included.
    """

    columns: Tensor
    valid: Tensor
    length: int

    @staticmethod
    def of(keep: Tensor, mask: Tensor) -> Slots:
        """Make the slots of tokens that `keep [b, s]` leaves of the real ones in `mask [b, s]`. Rows are padded to the longest.

        The padding is on the left, unless the full sequences are padded on the right.
        """
        left = keep & mask
        width = max(1, int(left.sum(1).max()))
        right = not bool(mask[:, -1].all())
        order = left.int().sort(dim=1, descending=right, stable=True).indices
        columns = order[:, :width] if right else order[:, -width:]
        return Slots(columns, left.gather(1, columns), left.shape[1])

    @staticmethod
    def identity(rows: int, length: int, device: Any = None) -> Slots:
        """Make the slots in which every column is left."""
        columns = torch.arange(length, device=device).expand(rows, -1)
        return Slots(columns, torch.ones_like(columns, dtype=torch.bool), length)

    @property
    def width(self) -> int:
        """Number of slots in a row, padding included."""
        return self.columns.shape[1]

    def full(self, slots: int) -> int:
        """Length of the full sequence when these slots and tokens behind them, none dropped, fill `slots`."""
        return slots - self.width + self.length

    def pick(self, x: Tensor, dim: int = 1) -> Tensor:
        """Reduce the `length` columns of `x` at `dim` to the slots; the batch (or 1) is the dimension before."""
        shape = [1] * (dim - 1) + list(self.columns.shape) + [1] * (x.ndim - dim - 1)
        return torch.take_along_dim(x, self.columns.to(x.device).view(shape), dim)

    def spread(self, x: Tensor) -> Tensor:
        """Put the rows `x [b, m, ...]` of the slots back at their columns, `[b, length, ...]`, zeros where there is none."""
        out = x.new_zeros(len(x), self.length + 1, *x.shape[2:])
        index = self.columns.where(self.valid, self.length).to(x.device)  # padding goes behind the last column
        out[torch.arange(len(x), device=x.device)[:, None], index] = x
        return out[:, : self.length]

    def slots(self, fewer: Slots) -> Tensor:
        """Find the slots `[b, k]` in which the columns of `fewer [b, k]`, a part of these, stand; any slot for its padding."""
        slots = torch.arange(self.width, device=self.columns.device).expand_as(self.columns)
        place = torch.zeros(len(slots), self.length + 1, dtype=torch.long, device=slots.device)
        place.scatter_(1, self.columns.where(self.valid, self.length), slots)  # padding's column may be another slot's
        return place.gather(1, fewer.columns)

    def mask(self, full: Tensor) -> Tensor:
        """Reduce an attention mask `[b, length + t]` of the full sequence to the slots, `[b, m + t]`."""
        held = full[:, : self.length].gather(1, self.columns) * self.valid.to(full.dtype)
        return torch.cat([held, full[:, self.length :]], 1)

    def then(self, tokens: int, other: Slots) -> Slots:
        """Join these slots, `tokens` columns behind them that are all kept, and `other` behind those."""
        between = Slots.identity(len(self.columns), tokens, self.columns.device)
        parts = (self, between, other)
        starts = (0, self.length, self.length + tokens)
        columns = torch.cat([part.columns + start for part, start in zip(parts, starts, strict=True)], 1)
        return Slots(columns, torch.cat([part.valid for part in parts], 1), starts[2] + other.length)
