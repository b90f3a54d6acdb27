"""Compare continuations: they may part only where two tokens are nearly equally likely."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vlmcompress.errors import UserError

TIES = {"float32": 1e-3}
HALF_TIE = 0.25  # nats: logits of about 16 are 1/8 apart in bfloat16


@dataclass(frozen=True)
class Pair:
    """The expected continuation of a request, and the engine's record of it."""

    id: str
    expected: Sequence[int]
    record: dict[str, Any]

    def margin(self) -> float:
        """Log-probability of the engine's token above that of the expected one where they part, in nats.

        0 when they don't part, infinity when the expected one was not among the likeliest.
        """
        got = self.record["tokens"][0]
        at = next((at for at, (a, b) in enumerate(zip(got, self.expected, strict=False)) if a != b), None)
        if at is None:
            return 0.0 if len(got) == len(self.expected) else math.inf
        likely = dict(map(tuple, self.record["best"][at]))
        return abs(likely.get(got[at], math.inf) - likely.get(self.expected[at], -math.inf))


def same(pairs: Iterable[Pair], dtype: str) -> str:
    """Compare pairs; return in words how many are the same.

    Raises:
        UserError: a pair differs, and no tie explains it.
    """
    margins = {pair.id: pair.margin() for pair in pairs}
    limit = TIES.get(dtype, HALF_TIE)
    wrong = [name for name, margin in margins.items() if margin > limit]
    if wrong:
        first = f"first '{wrong[0]}', by {margins[wrong[0]]:.2g} nats"
        raise UserError(f"{len(wrong)} of {len(margins)} answers differ, {first}")
    ties = [margin for margin in margins.values() if margin]
    tied = f", {len(ties)} of them but for ties within {max(ties):.1g} nats" if ties else ""
    return f"{len(margins)} of {len(margins)} answers equal{tied}"
