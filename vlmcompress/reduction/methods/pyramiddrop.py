"""PyramidDrop: fewer and fewer visual tokens as the language model gets deeper (arXiv 2410.17247).

The decoder's blocks are cut into `stages` of equal length (of lengths that differ by one, where they don't divide). The
first holds all `n` tokens of an image; after each the tokens that the prompt's last token attends to most stay, so that

    stage s holds round(n * ratio^s) tokens, at least 1;  mean over L blocks: sum_s blocks_s * ratio^s / L = keep

The published values are a `ratio` of 0.5 and 4 stages: drops after 8, 16 and 24 of 32 blocks, 15/32 of the visual tokens on
average. `keep` computes the ratio for a mean share instead, so that shares are comparable with methods before the language
model; as the first stage drops nothing, it must exceed `1 / stages`. `saliency` is the attention of the last token in a
stage's last block, as in the paper's text; its code uses queries and keys of the next block, and rounds down. Tokens that stay
keep their positions. Depends on the question, and favours the image's last rows, as FastV does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmcompress.reduction.methods._base import (
    Grid,
    ReducerOptions,
    Reduction,
    Signals,
    check_keep,
    check_whole,
    rounded,
    top,
)

STAGE = "llm"
NEEDS = frozenset({"saliency"})
COUNT = "fixed"
SERVED = False
WHY_NOT = "it drops tokens within the language model, and engines keep one token count for all layers"


@dataclass(frozen=True)
class Options(ReducerOptions):
    """`keep`: share of the tokens, mean over the language model's blocks; `stages`: into which the blocks are cut; `ratio`:
    share of its tokens that a stage passes on; if set, it determines `keep`."""

    keep: float = 0.5
    stages: int = 4
    ratio: float | None = None

    def __post_init__(self) -> None:
        check_whole("stages", self.stages, least=2)
        if self.ratio is not None:
            if isinstance(self.ratio, bool) or not 0 < self.ratio <= 1:
                raise ValueError(f"ratio must be a number above 0 and at most 1, got {self.ratio!r}")
            # The geometric series of shares ratio^s over equal stages, divided by their number.
            mean = 1.0 if self.ratio == 1 else (1 - self.ratio**self.stages) / (1 - self.ratio) / self.stages
            object.__setattr__(self, "keep", mean)
        check_keep(self.keep)

    @property
    def share(self) -> float:
        """Share of the tokens that `budget` keeps."""
        return self.keep

    def drops(self, blocks: int) -> tuple[tuple[int, ReducerOptions], ...]:
        """One drop after each stage but the last, to a share of all tokens."""
        if blocks < self.stages:
            raise ValueError(f"{blocks} blocks do not divide into {self.stages} stages; give stages={blocks} or fewer")
        starts = [stage * blocks // self.stages for stage in range(self.stages)]
        lengths = [end - start for start, end in zip(starts, [*starts[1:], blocks], strict=True)]
        ratio = _ratio(self.keep, lengths) if self.ratio is None else self.ratio
        settings = {name: value for name, value in self.settings().items() if name != "keep"}
        return tuple(
            (start, _Drop(keep=self.keep, share=ratio**stage, **settings))
            for stage, start in enumerate(starts)
            if stage
        )

    def budget(self, grid: Grid) -> int:
        """Number of tokens after one drop; with the options of the whole method the mean over equal stages, rounded.

        All tokens where the share `keep` rounds to none.
        """
        if not rounded(grid, self.keep):
            return math.prod(grid)
        return max(1, rounded(grid, self.share))


@dataclass(frozen=True)
class _Drop(Options):
    """The options of one of the drops. `share`: the share of all tokens that remains after it."""

    share: float = 1.0


def reduce(signals: Signals, options: Options) -> Reduction:
    """Keep the most attended of the remaining tokens."""
    assert signals.saliency is not None
    return Reduction.keep(top(signals.saliency, options.budget(signals.grid)), signals.n)


def _ratio(keep: float, lengths: list[int]) -> float:
    """Find the ratio at which the mean over stages of these lengths, in blocks, is `keep`."""
    blocks = sum(lengths)
    if keep * blocks <= lengths[0]:
        remedy = ", or more stages" if blocks > len(lengths) else ""
        raise ValueError(
            f"keep={keep:g} is out of reach, as the first of {len(lengths)} stages, {lengths[0]} of {blocks} blocks, holds all "
            f"tokens; choose more than {lengths[0] / blocks:.3g}{remedy}"
        )
    # The mean rises with the ratio, so bisection finds it; in closed form it is the root of a polynomial of degree stages - 1.
    low, high = 0.0, 1.0
    for _ in range(64):  # to the last bit
        middle = (low + high) / 2
        below = sum(length * middle**stage for stage, length in enumerate(lengths)) < keep * blocks
        low, high = (middle, high) if below else (low, middle)
    return high
