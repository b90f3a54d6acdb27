"""A rule from Q-VLM's proxy (arXiv 2410.08119): blocks whose activations have the least entropy get the fewest bits.

Q-VLM takes a block's activation entropy for how strongly its error spreads into the blocks after it, and searches strongly
coupled blocks together; the paper allocates no bits. Ranking by its entropy is ours, to compare with `luq` and `error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmcompress.allocation import Candidates, Key
from vlmcompress.allocation._ranked import by_rank, rising

NEEDS = frozenset({"entropy"})


def decide(candidates: Candidates, budget: int, facts: Mapping[str, Any]) -> dict[Key, int]:
    """Rank blocks by `facts["entropy"]["qvlm"]`, the entropy of each block in bits. Raises `Unreachable`."""
    return by_rank(candidates, budget, rising(facts["entropy"]["qvlm"], sorted({layer for layer, _ in candidates})))
