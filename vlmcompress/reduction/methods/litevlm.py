"""Which views of several are worth encoding for a question, after LiteVLM's patch selection (arXiv 2506.07416),
untrained.

The tokens here are the views (cameras, pages, crops) of one request: the grid is `(views, 1, 1)`, `features` an
embedding of each, of its name or of a thumbnail, and `query` embeddings of the question in the same space. A view
scores its best cosine to the question, plus its entry of `saliency`, how well its name matches the question's
words (`matches`). The paper trains a small text encoder on a fixed rig of cameras for the first part; this
needs no training and claims none of its results. At least one view stays. Runs before the encoder; a dropped view still has
one token, which engines need. Questions about the whole scene suffer. Views without names score the same, and then the first
ones stay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.reduction.methods._base import Reducer, Reduction, Signals, top, unit


@dataclass(frozen=True)
class LiteVLM(Reducer):
    """`keep`: share of the views."""

    STAGE = "pixels"
    NEEDS = frozenset({"features", "query"})
    NO_BETTER_THAN = "random"

    keep: float = 0.5

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep the views with the highest scores."""
        assert signals.features is not None and signals.query is not None
        scores = torch.zeros(signals.n, device=signals.features.device)
        if len(signals.query):
            # [views, words] cosines; a view is as relevant as its best word.
            scores = (unit(signals.features) @ unit(signals.query.to(signals.features.device)).T).amax(1)
        if signals.saliency is not None:
            scores = scores + signals.saliency.to(scores)
        return Reduction.keep(top(scores, self.budget(signals.grid)), signals.n)


def matches(names: Sequence[str], question: str) -> Tensor:
    """The share of each name's words that occur in the question, case-insensitively, `[views]`; 0 for a name without words."""
    query_words = set(re.findall(r"\w+", question.lower()))
    words = [re.findall(r"[^\W_]+", name.lower()) for name in names]
    return torch.tensor(
        [
            sum(word in query_words for word in name_words) / len(name_words) if name_words else 0.0
            for name_words in words
        ]
    )


REDUCER = LiteVLM()
