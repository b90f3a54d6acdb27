"""Which rows of a batch are of which modality, and which of them are kept: worked out once, on the CPU, from masks alone.

All layers of a decoder see the same tokens, so that what is worked out for a batch serves every one of them, and no layer has
to ask an accelerator how many rows of a kind there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmcompress.numerics.statistics.balance import MODALITIES

Drawn = tuple[Tensor, Tensor]
"""(slot, row) index pairs of a sample of rows, `[n]` each."""


@dataclass(frozen=True)
class Split:
    """The rows of a batch `[tokens, in]` by modality, for modalities that occur.

    Attributes:
        tokens: rows of the batch, those of no modality included.
        count: modality -> number of its rows.
        rows: modality -> their indices `[n]`; None: all rows of the batch are of it.
        drawn: modality -> where those of its rows go that a sample of all batches keeps.
    """

    tokens: int
    count: dict[str, int]
    rows: dict[str, Tensor | None]
    drawn: dict[str, Drawn]

    def to(self, device: torch.device) -> Split:
        """The same with its indices on `device`, for which nothing waits."""

        def sent(index: Tensor) -> Tensor:
            return index.to(device, non_blocking=True)

        rows = {name: None if index is None else sent(index) for name, index in self.rows.items()}
        drawn = {name: (sent(places), sent(index)) for name, (places, index) in self.drawn.items()}
        return replace(self, rows=rows, drawn=drawn)


def split_modalities(mask: Tensor) -> Split:
    """Split a batch by the modality of its tokens, `[...]`: 0 ignored, 1 text, 2 vision, 3 answer. No rows are drawn."""
    flat, result = mask.reshape(-1).cpu(), Split(mask.numel(), {}, {}, {})
    for code, name in enumerate(MODALITIES, start=1):
        index = (flat == code).nonzero().squeeze(1)
        if len(index):
            result.count[name] = len(index)
            result.rows[name] = None if len(index) == len(flat) else index
    return result


def splits(
    masks: Sequence[Tensor], batches: Sequence[Sequence[int]], size: int | Mapping[str, int], seed: int = 0
) -> list[Split]:
    """Split all batches of a run, and draw `size` rows of each modality, or so many of one as it says, from all of them.

    Args:
        masks: modality of each sample's tokens, `[tokens]` or `[1, tokens]`.
        batches: the samples of each batch, where shorter ones are padded on the left. What is drawn does not depend on it.
        seed: of the draw; the same numbers of tokens draw the same ones.
    """
    flat = [mask.reshape(-1).cpu() for mask in masks]
    room = {name: size if isinstance(size, int) else size.get(name, 0) for name in MODALITIES}
    owners = {}  # of each modality [size, 2]: the sample and the token in each place; -1 where there are too few
    for code, name in enumerate(MODALITIES, start=1):
        owners[name], reservoir = torch.full((room[name], 2), -1), Reservoir(room[name], seed)
        for sample, mask in enumerate(flat):
            index = (mask == code).nonzero().squeeze(1)
            places, chosen = reservoir.draw(len(index))
            owners[name][places] = torch.stack([torch.full_like(chosen, sample), index[chosen]], 1)
    all_splits = []
    for batch in batches:
        length = max(len(flat[sample]) for sample in batch)
        masks_of_batch = [torch.nn.functional.pad(flat[sample], (length - len(flat[sample]), 0)) for sample in batch]
        batch_split = split_modalities(torch.stack(masks_of_batch))
        starts = torch.full((len(flat),), -1)  # of each sample's first token; -1: it is in another batch
        for row, sample in enumerate(batch):
            starts[sample] = (row + 1) * length - len(flat[sample])
        for name in batch_split.count:
            start = starts[owners[name][:, 0]]
            # A row that was drawn and is in this batch: its index in the padded batch, and its place in the sample.
            places = ((start >= 0) & (owners[name][:, 0] >= 0)).nonzero().squeeze(1)
            batch_split.drawn[name] = places, start[places] + owners[name][places, 1]
        all_splits.append(batch_split)
    return all_splits


class Reservoir:
    """A uniform sample of at most `size` of all rows that it is offered; memory holds these and one batch.

    Each row gets a random number and the smallest stay. The numbers depend on `seed` and on how many rows came before, so that
    reservoirs that see the same tokens in the same order keep the same ones, and rows need not be seen to be drawn.
    """

    def __init__(self, size: int, seed: int):
        self.random = torch.Generator().manual_seed(seed)
        self.keys = torch.full((size,), torch.inf, dtype=torch.float64)  # key of each place; infinite where it is free
        self.kept = torch.empty(0)  # [size, in] once there was a batch

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw from the next `count` rows: places `[n]` of the sample, and which of the rows go there, `[n]`."""
        # The `size` smallest of independent uniform keys are a uniform sample without replacement, however rows are batched.
        size = len(self.keys)
        keys = torch.cat([self.keys, torch.rand(count, dtype=torch.float64, generator=self.random)])
        stays = torch.zeros(len(keys), dtype=torch.bool)
        stays[-1 - keys.flip(0).argsort(stable=True)[:size]] = True  # flipped, so that free places fill in order
        places, new = (~stays[:size]).nonzero()[:, 0], stays[size:].nonzero()[:, 0]
        self.keys[places] = keys[size + new]
        return places, new

    def update(self, x: Tensor) -> None:
        """Offer the rows of `x [tokens, in]`."""
        if not self.kept.numel():
            self.kept = torch.empty(len(self.keys), x.shape[1])
        places, new = self.draw(len(x))
        self.kept[places] = x[new.to(x.device)].float().cpu()

    def rows(self) -> Tensor:
        """The rows drawn so far, `[at most size, in]` in float32."""
        return self.kept[self.keys.isfinite()]
