"""CDPruner: tokens that differ, and matter for the question if asked to, by a determinantal point process (arXiv 2506.10967).

The kernel is `L_ij = r_i cos(x_i, x_j) r_j`, r the relevance of each token. A set is worth the determinant of its part of L:
its tokens' squared relevances times the squared volume that their directions span. Greedy, as published: always the token that
multiplies the determinant most, found by one row of a Cholesky factor for each token kept (Chen, Zhang and Zhou, 2018).

By default all tokens are equally relevant, so this is the plain process, and an image's result serves every question.
`relevance=question` is the conditional one that the paper is about. Where it differs: the paper takes r from CLIP's text
encoder, which checkpoints of language models do not have; here it is the mean cosine of the projected token to the
embeddings of the question's words, the only text that transformers and vLLM both have before the language model runs,
stretched to 0...1 as published. Nobody trained their cosines to say anything, so expect less of it than of CLIP's. The
published code for LLaVA turns CLIP's round, the least similar token being the most relevant; this does not.

The published determinant is 0 for more tokens than directions and for copies, and rounding then decides. Here every token has
a direction of its own besides, `OWN` of its squared length, so the choice goes on among those that are least spanned. Without
relevance all tokens are worth the same at first, and the lowest index leads.

Costs `n^2 d` multiply-adds for the cosines, `n m^2 / 2` for m tokens kept, and `4 n (n + m)` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vlmcompress.reduction.methods._base import Grid, Reduction, Signals, share, unit
from vlmcompress.reduction.methods._selecting import SelectingOptions, selected

STAGE = "projected"
NEEDS = frozenset({"features"})
OPTIONAL = frozenset({"query"})
COUNT = "fixed"
SERVED = True
BATCHED = True
OWN = 1e-3
"""What is added to the kernel's diagonal, whose entries are 1 before relevance."""
_FLAT = 1e-6  # cosines that differ by less are rounded forms of one


@dataclass(frozen=True)
class Options(SelectingOptions):
    """`keep`: share of the tokens; `relevance`: `none`, all tokens are alike, or `question`, by their cosine to its words."""

    relevance: Literal["none", "question"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relevance not in ("none", "question"):
            raise ValueError(f"relevance must be none or question, got {str(self.relevance)[:40]!r}")

    @property
    def asks(self) -> bool:
        """The question decides what is relevant, where it is asked to."""
        return self.relevance == "question"


def budget(grid: Grid, options: Options) -> int:
    """Number of tokens to keep: the share `keep`."""
    return share(grid, options.keep)


def reduce(signals: Signals, options: Options) -> Reduction:
    """Keep the set of tokens of large determinant. ValueError where relevance is asked for and there is no question."""
    features, query = signals.features, signals.query
    assert features is not None
    relevance = torch.ones(signals.n, device=features.device)
    if options.asks:
        if query is None:
            raise ValueError("relevance=question needs signals that are missing: query")
        relevance = relevant(features, query.to(features.device))
    return selected(select(features, relevance, budget(signals.grid, options)), signals, options)


def relevant(features: Tensor, query: Tensor) -> Tensor:
    """Relevance `[n]` of rows `features [n, d]` to the words `query [q, d]`, from 0 to 1; all 1 where none stands out."""
    if len(query) == 0:
        return torch.ones(len(features), device=features.device)
    match = unit(features) @ unit(query).mean(0)
    low, high = match.amin(), match.amax()
    stretched = (match - low) / (high - low).clamp(min=_FLAT)
    return torch.where(high - low > _FLAT, stretched, 1.0)


def select(features: Tensor, relevance: Tensor, count: int) -> Tensor:
    """Choose `count` of rows `[n, d]` of relevance `[n]`; returns their indices in the order in which they are chosen.

    `left` is what of each token's squared length the chosen ones do not span, never less than `OWN`. Relevance only scales a
    determinant, so it stays out of the factor.
    """
    rows = unit(features)
    kernel = rows @ rows.T
    left = (rows != 0).any(1).float() + OWN  # exactly alike, so that rounding does not choose the first token
    worth, factor, chosen = relevance.square(), torch.zeros_like(kernel[:count]), []
    for i in range(count):
        token = (worth * left).argmax(0, keepdim=True)
        chosen.append(token)
        worth = worth.scatter(0, token, -torch.inf)
        before = factor[:i]
        rest = kernel.index_select(0, token)[0] - before.index_select(1, token)[:, 0] @ before
        row = rest / left.index_select(0, token).sqrt()
        factor[i] = row
        left = (left - row.square()).clamp(min=OWN)
    return torch.cat(chosen)
