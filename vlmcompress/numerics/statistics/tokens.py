"""Which rows of a batch belong to which modality, and which of them are sampled: computed once, on the CPU, from masks alone.

All layers of a decoder see the same tokens, so one result per batch serves all of them, and no layer has to wait for an
accelerator to learn how many rows a modality has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmcompress.numerics.statistics.balance import MODALITIES

Drawn = tuple[Tensor, Tensor]
"""Indices of sampled rows, `[n]` each: slots of the sample, and the rows that go there."""


@dataclass(frozen=True)
class Split:
    """The rows of a batch `[tokens, in]` by modality, for modalities that occur.

    Attributes:
        tokens: number of rows of the batch, including ignored ones.
        count: modality -> number of its rows.
        rows: modality -> indices `[n]` of its rows; None: all rows of the batch.
        drawn: modality -> its rows that are part of the sample over all batches, with their slots.
    """

    tokens: int
    count: dict[str, int]
    rows: dict[str, Tensor | None]
    drawn: dict[str, Drawn]

    def to(self, device: torch.device) -> Split:
        """A copy with the indices on `device`; transfers are asynchronous."""

        def sent(index: Tensor) -> Tensor:
            return index.to(device, non_blocking=True)

        rows = {name: None if index is None else sent(index) for name, index in self.rows.items()}
        drawn = {name: (sent(places), sent(index)) for name, (places, index) in self.drawn.items()}
        return replace(self, rows=rows, drawn=drawn)

    def codes(self, device: torch.device) -> Tensor:
        """The modality of each row, as in `split_modalities`: `[tokens]`."""
        codes = torch.zeros(self.tokens, dtype=torch.uint8, device=device)
        for name, index in self.rows.items():
            codes[slice(None) if index is None else index] = 1 + MODALITIES.index(name)
        return codes


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
    """Split all batches of a run by modality, and draw a sample of `size` rows of each modality (or a size per modality) from
    all.

    Args:
        masks: modality of each sample's tokens, `[tokens]` or `[1, tokens]`.
        batches: indices of each batch's samples, the shorter ones padded on the left. They do not affect which rows are drawn.
        seed: seed of the draw; equal numbers of tokens give equal draws.
    """
    flat = [mask.reshape(-1).cpu() for mask in masks]
    room = {name: size if isinstance(size, int) else size.get(name, 0) for name in MODALITIES}
    owners = {}  # modality -> [size, 2]: sample and token in each slot; -1 where slots stay empty
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
        # position of each sample's first token; -1: the sample is in another batch
        starts = torch.full((len(flat),), -1)
        for row, sample in enumerate(batch):
            starts[sample] = (row + 1) * length - len(flat[sample])
        for name in batch_split.count:
            start = starts[owners[name][:, 0]]
            # Drawn rows of this batch: index in the padded batch, and slot in the sample.
            places = ((start >= 0) & (owners[name][:, 0] >= 0)).nonzero().squeeze(1)
            batch_split.drawn[name] = places, start[places] + owners[name][places, 1]
        all_splits.append(batch_split)
    return all_splits


def thinned(masks: Sequence[Tensor], tokens: int, seed: int = 0) -> list[Tensor]:
    """Ignore all but `tokens` of the samples' tokens, drawn uniformly from each modality of each sample in proportion.

    What stays of a modality, and of a modality of a sample, is its share rounded up or down. Padding and the batches in which
    samples run do not matter.

    Args:
        masks: modality of each sample's tokens, any shape; 0 where a token is ignored already.
        tokens: number that stays; 0, or at least as many as there are: all, and `masks` are returned unchanged.
        seed: seed of the draw.
    """
    total = sum(int((mask > 0).sum()) for mask in masks)
    if not 0 < tokens < total:
        return list(masks)
    kept, random = [torch.zeros_like(mask) for mask in masks], torch.Generator().manual_seed(seed)
    before = 0  # tokens of the modalities and samples so far: of the first n exactly n * tokens // total stay
    for code in range(1, 1 + len(MODALITIES)):
        for mask, sample in zip(masks, kept, strict=True):
            index = (mask.reshape(-1) == code).nonzero().squeeze(1)
            count = (before + len(index)) * tokens // total - before * tokens // total
            before += len(index)
            chosen = index[torch.randperm(len(index), generator=random)[:count].to(index.device)]
            sample.view(-1)[chosen] = code
    return kept


class Reservoir:
    """A uniform sample of at most `size` rows from a stream of batches; memory holds the sample and one batch.

    Each row gets a random key, and the rows with the smallest keys stay. Keys depend only on `seed` and the number of rows
    before, so reservoirs that see equally many rows keep the same ones, and rows can be drawn before they exist.
    """

    def __init__(self, size: int, seed: int):
        self.random = torch.Generator().manual_seed(seed)
        self.keys = torch.full((size,), torch.inf, dtype=torch.float64)  # key of each slot; infinite where it is free
        self.kept = torch.empty(0)  # [size, in] after the first batch

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw from the next `count` rows: slots `[n]` of the sample, and indices `[n]` of the rows that go there."""
        # The `size` smallest of independent uniform keys are a uniform sample without replacement, however rows are batched.
        size = len(self.keys)
        keys = torch.cat([self.keys, torch.rand(count, dtype=torch.float64, generator=self.random)])
        stays = torch.zeros(len(keys), dtype=torch.bool)
        stays[-1 - keys.flip(0).argsort(stable=True)[:size]] = True  # flipped, so that free places fill in order
        places, new = (~stays[:size]).nonzero()[:, 0], stays[size:].nonzero()[:, 0]
        self.keys[places] = keys[size + new]
        return places, new

    def update(self, x: Tensor) -> None:
        """Draw from the rows of `x [tokens, in]`."""
        if not self.kept.numel():
            self.kept = torch.empty(len(self.keys), x.shape[1])
        places, new = self.draw(len(x))
        self.kept[places] = x[new.to(x.device)].float().cpu()

    def rows(self) -> Tensor:
        """The rows drawn so far, `[at most size, in]` in float32."""
        return self.kept[self.keys.isfinite()]
