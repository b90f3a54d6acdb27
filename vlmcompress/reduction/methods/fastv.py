"""FastV: after the language model's first layers keep the tokens that the last token attends to most (arXiv 2403.06764).

`saliency` is the attention of the prompt's last token in layer K - 1, mean over heads; the tokens with the highest stay from
layer K on. Depends on the question, and favours the image's last rows, which are closest to it. The paper's code also has a
mode that only masks tokens, which saves nothing and is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from vlmcompress.reduction.methods._base import Reducer, Reduction, Signals, top


@dataclass(frozen=True)
class FastV(Reducer):
    """`keep`: share of the tokens; `layer`: K, number of the decoder block, from 0, whose input is reduced."""

    STAGE = "llm"
    NEEDS = frozenset({"saliency"})
    SERVED = False
    WHY_NOT = "it drops tokens within the language model, and engines keep one token count for all layers"

    keep: float = 0.5
    layer: int = 2

    @override
    def reduce(self, signals: Signals) -> Reduction:
        """Keep the most attended tokens."""
        assert signals.saliency is not None
        # The paper averages the attention that a token receives from all others (phi_attn); its code, and this, use the last
        # token's.
        return Reduction.keep(top(signals.saliency, self.budget(signals.grid)), signals.n)


REDUCER = FastV()
