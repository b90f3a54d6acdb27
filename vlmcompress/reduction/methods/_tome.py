"""Bipartite soft matching of ToMe (arXiv 2210.09461), on which `dymu` builds.

Between attention and MLP of each layer the tokens are split into alternate sets A and B; each of A finds the most
similar of B by cosine of the keys (mean over heads), and the most similar pairs merge into their size-weighted mean.

Deviations: each layer's outputs are put back in raster order, which a language model needs and which from the second
layer on splits A and B differently than the published order [A, B]; the caller keeps a CLS token aside, so A begins with the
first patch.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from vlmcompress.reduction.methods._base import Reduction, Signals, unit


def match(keys: Tensor, heads: int, filled: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Match each even row of `keys [n, dk]` to the most similar odd one: cosines `[a]`, and row numbers `[a]`.

    `filled [n]`: which rows are not padding; cosines of and to padding are -inf. None: all rows are used.
    """
    # The metric of ToMe: keys averaged over heads, then normalized; [n, dk / heads].
    rows = unit(keys.float().view(len(keys), heads, -1).mean(1))
    if len(rows) < 2:
        return rows.new_full((len(rows),), -torch.inf), torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    # A is the even, B the odd tokens (bipartite soft matching): [a, b] cosines, none within A or within B.
    cosines = rows[::2] @ rows[1::2].T
    if filled is not None:
        cosines = cosines.where(filled[::2, None] & filled[1::2], -torch.inf)
    # Each token of A draws one edge, to its most similar token of B; several may go to the same one.
    best = cosines.max(1)
    return best.values, 2 * best.indices + 1


def join(chosen: Tensor, partner: Tensor, signals: Signals) -> Reduction:
    """Merge the rows `2 * chosen` into their partners, each row weighted by its number of tokens."""
    parent = torch.arange(signals.n, device=partner.device)
    # The r best edges merge; the other tokens are their own parents and stay.
    parent[2 * chosen] = partner[chosen]
    # x = sum(size * x) / sum(size): merged tokens are weighted by their size.
    weight = None if signals.merged is None else signals.merged.sizes
    return dataclasses.replace(Reduction.join(parent, weight, signals.n - len(chosen)), plain=not len(chosen))
