"""DART as published, within the language model (arXiv 2502.11494): from layer K = 2 on only pivots and the tokens least
similar to them stay.

`features` and `query` are the output of layer K - 1 through the model's final norm, of the image's tokens and of the
text after it; `keys` and `query_keys` are that layer's keys with heads concatenated, and the L1 norm of the keys
chooses the pivots. The order of pivots and the count are as in `dart`.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from vlmcompress.reduction.methods._base import Reducer, Reduction, Signals, top
from vlmcompress.reduction.methods.dart import select

PIVOTS = 4
"""Number of pivots of the image, and as many of the text, as published."""


@dataclass(frozen=True)
class DartLLM(Reducer):
    """`keep`: share of the tokens; `layer`: number of the decoder block, from 0, whose input is reduced."""

    STAGE = "llm"
    NEEDS = frozenset({"features", "keys", "query", "query_keys"})
    SERVED = False
    WHY_NOT = "it drops tokens within the language model, and engines keep one token count for all layers"

    keep: float = 0.5
    layer: int = 2

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep pivots, the tokens whose keys have the largest L1 norm, in image and text, and image tokens least like them."""
        assert signals.features is not None and signals.query is not None
        assert signals.keys is not None and signals.query_keys is not None
        lead = top(signals.keys.float().abs().sum(-1), PIVOTS)
        ask = top(signals.query_keys.float().abs().sum(-1), PIVOTS)
        count = self.budget(signals.grid)
        return Reduction.keep(select(signals.features, signals.query[ask], lead, count), signals.n)


REDUCER = DartLLM()
