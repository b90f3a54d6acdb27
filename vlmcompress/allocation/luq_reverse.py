"""The control for LUQ's rule: its order turned around, so that the blocks of *most* entropy get the fewest bits.

If it does as well as `luq`, the entropy says nothing about what a block's bits are worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmcompress.allocation import Candidates, Key
from vlmcompress.allocation._ranked import by_rank, rising

NEEDS = frozenset({"entropy"})


def decide(candidates: Candidates, budget: int, facts: Mapping[str, Any]) -> dict[Key, int]:
    """Rank blocks by `facts["entropy"]["luq"]`, the entropy of each block in bits. Raises `Unreachable`."""
    order = rising(facts["entropy"]["luq"], sorted({layer for layer, _ in candidates}))
    return by_rank(candidates, budget, order[::-1])
