"""Learned: the tokens scored highest by a small network, trained on images like yours.

`vlmcompress learn-reducer` trains it so that the language model answers with the selection as with all tokens
(`hooks.gated`). VisionSelector (arXiv 2510.16598) showed that a scorer of projected tokens can be trained in this way; network
and training here are different, and the network is much smaller, with `hidden` units.

The network reads a token `x_i` (each channel standardized over the training images), the image's mean and the token's
position, and has one attention step among the tokens of an image, as a token is worth less if others show the same:

    h_i = GELU(A x_i + a + B mean(x) + C place_i)
    g_i = h_i + V sum_j softmax_j(q_i k_j / sqrt(hidden)) h_j        q = Q h, k = K h
    score_i = w GELU(g_i)

The highest-scored tokens take most of the budget. But duplicates all score high, and content that no training question needed
scores low; so the share `cover` of the budget goes to the tokens that best represent the rest, by the facility location of
`coverage`.

It does not use the question, so an image's result can be reused for other questions.

Costs `2 n d hidden + 2 n^2 hidden` multiply-adds for `n` tokens.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from vlmcompress.reduction.methods import _selecting as selecting
from vlmcompress.reduction.methods._base import Grid, Reduction, Signals, require_number, top
from vlmcompress.reduction.methods._selecting import SelectingReducer
from vlmcompress.reduction.methods.coverage import represented

WAVES = 4
"""Number of frequencies, each twice the one before, whose sines and cosines describe a position besides row and column."""
PLACE = 2 + 4 * WAVES
FIXED = ("mean", "spread")
"""Tensors of a network that are measured, not trained."""


class Network:
    """The weights of a scorer, name -> tensor (`shapes`), held once for each device."""

    def __init__(self, weights: Mapping[str, Tensor]):
        self._weights = {torch.device("cpu"): dict(weights)}

    def on(self, device: torch.device) -> Mapping[str, Tensor]:
        """The weights on a device."""
        if device not in self._weights:
            here = self._weights[torch.device("cpu")]
            self._weights[device] = {name: value.to(device) for name, value in here.items()}
        return self._weights[device]


@dataclass(frozen=True)
class Learned(SelectingReducer):
    """`keep`: share of the tokens; `scorer`: the file that `vlmcompress learn-reducer` wrote.

    `sha256`: hash of that file, stored in checkpoints; computed when the file is read. `cover`: share of kept tokens
    chosen for coverage, not by score; 0.25 was chosen on the demo models' validation questions.
    """

    STAGE = "projected"
    NEEDS = frozenset({"features"})
    BATCHED = True

    scorer: str = dataclasses.field(default="", compare=False)
    sha256: str = ""
    cover: float = 0.25
    network: Network | None = dataclasses.field(default=None, compare=False, repr=False)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.scorer, str):
            raise ValueError(f"scorer must be the name of a file, got {str(self.scorer)[:40]!r}")
        if not isinstance(self.sha256, str) or not re.fullmatch(r"([0-9a-f]{64})?", self.sha256):
            raise ValueError(f"sha256 must be 64 hexadecimal digits, got {str(self.sha256)[:80]!r}")
        require_number("cover", self.cover, 0, 1)

    @property
    @override
    def by_channel(self) -> bool:
        """A network reads single channels."""
        return True

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep the tokens of highest score and, with the rest of the budget, those that cover the others best."""
        assert signals.features is not None
        if self.network is None:
            raise ValueError("learned has no scorer; train one with `vlmcompress learn-reducer` first")
        values = score(self.network.on(signals.features.device), signals.features, signals.grid)
        return self.selected(
            torch.cat(choose(values, signals.features, self.budget(signals.grid), self.cover)), signals
        )


def choose(values: Tensor, features: Tensor, count: int, cover: float) -> tuple[Tensor, Tensor]:
    """Indices of the highest-scored tokens and of those that cover the rest (`coverage`), `count` in all.

    Args:
        values: `[n]`, the tokens' scores; features: `[n, d]`, the tokens. cover: share of the count that covers the
        image.
    """
    # The highest-scored tokens come first, so that the covering ones do not duplicate them.
    rest = math.floor(cover * count + 0.5)
    best = top(values, count - rest)
    return best, selecting.cover(represented(features), rest, covered=best)


def shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The shape of each of a network's tensors, for tokens of `width` channels."""
    return {
        "mean": (width,),
        "spread": (width,),
        "token": (hidden, width),
        "bias": (hidden,),
        "image": (hidden, width),
        "place": (hidden, PLACE),
        "query": (hidden, hidden),
        "key": (hidden, hidden),
        "value": (hidden, hidden),
        "output": (hidden,),
    }


def initial(mean: Tensor, spread: Tensor, hidden: int, seed: int) -> dict[str, Tensor]:
    """A network's tensors before training, float32.

    Args:
        mean, spread: `[d]`, of each channel of the tokens of training images: mean and standard deviation.
    """
    random = torch.Generator().manual_seed(seed)
    weights = {"mean": mean.float().clone(), "spread": spread.float().clamp(min=1e-6)}
    for name, shape in shapes(len(mean), hidden).items():
        if name not in FIXED:
            scale = 0.0 if name in ("bias", "value") else shape[-1] ** -0.5
            weights[name] = torch.randn(shape, generator=random) * scale
    return weights


def score(weights: Mapping[str, Tensor], features: Tensor, grid: Grid) -> Tensor:
    """The score of each token of an image, `[n]` float32.

    Args:
        weights: see `shapes`.
        features: `[n, d]`, the tokens in raster order of `grid`.
    """
    # [n, d]; float32, as channels of large mean lose their differences in bfloat16.
    tokens = (features.float() - weights["mean"]) / weights["spread"]
    # h_i, [n, hidden]: token, image and position have separate matrices.
    hidden = tokens @ weights["token"].T + weights["bias"] + tokens.mean(0) @ weights["image"].T
    hidden = F.gelu(hidden + places(grid, features.device) @ weights["place"].T)
    # [n, n], one head of attention among the image's tokens.
    likeness = (hidden @ weights["query"].T) @ (hidden @ weights["key"].T).T
    others = (likeness / math.sqrt(hidden.shape[1])).softmax(-1) @ hidden
    return F.gelu(hidden + others @ weights["value"].T) @ weights["output"]


def places(grid: Grid, device: torch.device | None = None) -> Tensor:
    """The position features of each token in its frame, `[n, PLACE]`: middle of row and column, and sines and cosines."""
    frames, rows, columns = grid
    y, x = ((torch.arange(count, device=device) + 0.5) / count for count in (rows, columns))
    place = torch.stack(torch.meshgrid(y, x, indexing="ij"), -1).reshape(-1, 2)
    waves = [wave(place * 2**power * math.tau) for power in range(WAVES) for wave in (torch.sin, torch.cos)]
    return torch.cat([place, *waves], -1).repeat(frames, 1)


REDUCER = Learned()
