"""Coverage: tokens by which every token is best represented, a facility location (after MMTok, arXiv 2508.18264).

Token j represents token i as well as the softmax of i's cosines says, `s_ij = softmax_j(cos(x_i, x_j) / temperature)`. What is
kept maximizes the sum over all tokens i of the largest `s_ij` among the kept j. The sum is submodular, so the greedy choice,
always the token that adds most, reaches at least 1 - 1/e of the best sum that there is (Nemhauser, Wolsey and Fisher, 1978).
Unlike `divprune`, it prefers a token that stands for many to one that stands alone. By default the question is not looked at,
so an image's result can be reused for another question.

`relevance=question` covers the question's words `y_t [q, d]`, too, as MMTok does: with `c_tj = softmax_j(cos(y_t, x_j) /
text_temperature)`, what is kept maximizes the mean over tokens i of the largest `s_ij` plus `weight` times the mean over words
t of the largest `c_tj`. That is submodular as well. As published are the two means, their softmaxes, the greedy choice and
`temperature`; in MMTok's code the words' vectors are the language model's embeddings, too. Ours: cosines between tokens are
those of the projected rows, where MMTok takes the encoder's; all words of the prompt count, where MMTok's code for LLaVA takes
keywords; no second model rewrites the question; and `weight` and `text_temperature`. MMTok multiplies the tokens' mean by alpha
= 0.5, which is `weight=2`, with a `text_temperature` of 0.02 for LLaVA and 0.01 for Qwen. On the demo models' validation
questions so sharp a softmax spends small budgets on the words' favourites: with 0.02 and weights of 0.25 to 1 a ninth of the
tokens lost 6 to 14 points more than without the question. The defaults are the best of 8 settings tried at three shares there,
and are no better than without the question beyond what such a choice makes by chance.

Costs `n^2 d` multiply-adds for the cosines, `8 n^2` bytes, and at most `n^2` additions for each token kept, on a CPU a part of
that (`_selecting.lazily`); with q words `n (n + q)` in the place of `n^2`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vlmcompress.reduction.methods._base import Grid, Reduction, Signals, share, unit
from vlmcompress.reduction.methods._selecting import SelectingOptions, cover, selected

STAGE = "projected"
NEEDS = frozenset({"features"})
OPTIONAL = frozenset({"query"})
COUNT = "fixed"
SERVED = True
BATCHED = True
MOST = 1000.0
"""The largest `weight`. Far above it, rounding would hide what the choice adds for the image's tokens."""


@dataclass(frozen=True)
class Options(SelectingOptions):
    """`keep`: share of the tokens; `temperature`: of the softmax, low ones let a token be represented only by its like;
    `relevance`: `none`, or `question`, the tokens kept cover its words, too; `weight`: of all words, where all tokens weigh 1;
    `text_temperature`: of the softmax of a word over the tokens."""

    temperature: float = 0.2
    relevance: Literal["none", "question"] = field(default="none", kw_only=True)
    weight: float = field(default=0.25, kw_only=True)
    text_temperature: float = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("temperature", "text_temperature"):
            value = getattr(self, name)
            if not _number(value) or not 1e-3 <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least 0.001, got {value!r}")
        if self.relevance not in ("none", "question"):
            raise ValueError(f"relevance must be none or question, got {str(self.relevance)[:40]!r}")
        if not _number(self.weight) or not 0 < self.weight <= MOST:
            raise ValueError(f"weight must be a number above 0 and at most {MOST:g}, got {self.weight!r}")

    @property
    def asks(self) -> bool:
        """The question has a say where it is asked to."""
        return self.relevance == "question"


def budget(grid: Grid, options: Options) -> int:
    """Number of tokens to keep: the share `keep`."""
    return share(grid, options.keep)


def reduce(signals: Signals, options: Options) -> Reduction:
    """Keep the tokens that represent all of them best. ValueError where relevance is asked for and there is no question."""
    features, query = signals.features, signals.query
    assert features is not None
    worth = represented(features, options.temperature)
    if options.asks:
        if query is None:
            raise ValueError("relevance=question needs signals that are missing: query")
        words = represented(query.to(features.device), options.text_temperature, features)
        scale = options.weight * len(worth) / max(len(words), 1)  # the tokens' part stays a sum: `n` times both means
        worth = torch.cat([worth, scale * words])
    return selected(cover(worth, budget(signals.grid, options)), signals, options)


def represented(rows: Tensor, temperature: float, by: Tensor | None = None) -> Tensor:
    """How well row j of `by [n, d]` represents row i of `rows [m, d]`, `[m, n]`, each row's sum 1. By default each other."""
    rows = unit(rows)
    columns = rows if by is None else unit(by)
    return (rows @ columns.T / temperature).softmax(1)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
