"""Draw a few of many rows fairly in one pass: the random-key form of Vitter's reservoir sampling."""

from __future__ import annotations

import torch
from torch import Tensor


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
