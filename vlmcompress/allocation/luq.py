"""LUQ's rule (arXiv 2509.23729): the blocks whose input has the least entropy get the fewest bits, whatever the error.

Entropy is that of the clusters (k-means, K = 100) that a block's normalized input vectors fall into. The paper gives the lowest
blocks about 1 bit (BiLLM, which no engine runs) and the others 4; here they get the smallest of the widths to choose from and
the next one up that the budget has no room for everywhere, as many as fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmcompress.allocation import Candidates, Key
from vlmcompress.allocation._ranked import by_rank, rising

NEEDS = frozenset({"entropy"})


def decide(candidates: Candidates, budget: int, facts: Mapping[str, Any]) -> dict[Key, int]:
    """Rank blocks by `facts["entropy"]["luq"]`, the entropy of each block in bits. Raises `Unreachable`."""
    return by_rank(candidates, budget, rising(facts["entropy"]["luq"], sorted({layer for layer, _ in candidates})))
