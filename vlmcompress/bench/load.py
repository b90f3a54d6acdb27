"""Loads: the times at which a benchmark's requests are sent.

A closed load is N clients, each of which sends its next request when its last one is answered: it shows capacity at a
given concurrency. An open load is a Poisson process of R requests a second, whatever the server does: it shows the
latency of a service, queueing included.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from vlmcompress.errors import UserError, did_you_mean

KINDS = ("closed", "rate")


@dataclass(frozen=True)
class Load:
    """A load. Kind `closed`: `amount` clients; kind `rate`: `amount` requests per second."""

    kind: Literal["closed", "rate"]
    amount: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.amount:g}"

    @property
    def default_requests(self) -> int:
        """Number of requests after which the load was mostly in its steady state: 16 rounds of all clients, or a minute."""
        return max(64, math.ceil(self.amount * (16 if self.kind == "closed" else 60)))

    def arrivals(self, requests: int, seed: int) -> list[float] | None:
        """Draw the arrival times of an open load's requests, in seconds from the start, rising; None for a closed load.

        Gaps are exponential with mean 1 / rate. Unlike vLLM's benchmark, the last arrival is not moved to requests / rate:
        both sides get the same arrivals, so there is no variance between them to remove.
        """
        if self.kind == "closed":
            return None
        draw, now, times = random.Random(seed), 0.0, []
        for _ in range(requests):
            now += draw.expovariate(self.amount)
            times.append(now)
        return times


def parse(text: str) -> Load:
    """Read a load like `closed:8` or `rate:2.5`.

    Raises:
        UserError: neither of these, or the number is not above zero (for clients: not whole).
    """
    kind, colon, number = text.partition(":")
    if kind not in KINDS:
        raise UserError(f"--load {text}: no load '{kind}'{did_you_mean(kind, KINDS)}; e.g. closed:8 or rate:2.5")
    what = "a whole number of clients" if kind == "closed" else "requests per second"
    try:
        amount = int(number) if kind == "closed" else float(number)
    except ValueError:
        amount = 0
    if not colon or not 0 < amount < math.inf:
        raise UserError(f"--load {text}: '{number}' should be {what} above 0; e.g. closed:8 or rate:2.5")
    return Load("closed" if kind == "closed" else "rate", amount)
