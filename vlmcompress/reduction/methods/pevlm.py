"""PEVLM: blocks of a long video that do not attend to each other, for parallel prefill (arXiv 2506.19651).

It does not reduce tokens: all stay, at their original positions, and `mask` restricts attention. The text before the images
and the first frame form a sink that all tokens see; a block of frames sees the sink and itself; the question at the end sees
everything; all causally. Attention on the blocks then costs `t / frames` times less; the cache is not smaller. With a single
block it equals full attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Grid, Reducer, Reduction, Signals, require_whole


@dataclass(frozen=True)
class PEVLM(Reducer):
    """`frames`: number of frames in a block."""

    STAGE = "llm"
    RESTRICTS = True
    SERVED = False
    WHY_NOT = "its block-sparse attention needs a kernel that engines do not have"

    frames: int = 8

    @override
    def __post_init__(self) -> None:
        require_whole("frames", self.frames, least=1)

    @override
    def budget(self, grid: Grid) -> int:
        """Number of tokens to keep: all."""
        return math.prod(grid)

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep all tokens."""
        return Reduction.identity(signals.n, signals.device)

    @override
    def attention_parts(self, images: Sequence[tuple[int, int]], length: int) -> list[int]:
        """Lengths of sink, blocks and question of several images, each a frame; text belongs to the image after it.

        Args:
            images: first token and number of tokens of each, ascending; at least one.
            length: length of the sequence; the text after the last image is the question.
        """
        ends = [first + tokens for first, tokens in images]
        edges = [0, ends[0]]
        edges += [ends[min(start + self.frames, len(ends)) - 1] for start in range(1, len(ends), self.frames)]
        return [end - start for start, end in zip(edges, [*edges[1:], length], strict=True)]


def mask(lengths: Sequence[int]) -> Tensor:
    """Make the mask `[s, s]` bool, true where the row's token may attend to the column's.

    Args:
        lengths: tokens of the sink, of each block, and of the question, in the order of the sequence; their sum is `s`.
    """
    if len(lengths) < 2 or any(type(length) is not int or length < 0 for length in lengths):
        raise ValueError(f"lengths are those of the sink, the blocks and the question, got {list(lengths)!r}")
    part = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    query, key = part[:, None], part[None, :]
    # The sink is part 0, the question the last part; everything else sees the sink and itself.
    visible = (key == 0) | (key == query) | (query == len(lengths) - 1)
    return visible & torch.ones_like(visible).tril()


REDUCER = PEVLM()
