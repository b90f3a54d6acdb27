"""An orthogonal matrix by which rows are multiplied: a Hadamard matrix with random signs, or a random one.

Multiplied by `R = diag(s) H / sqrt(n)`, s random signs, what one channel holds is spread evenly over all n, so that a few
channels of large values, and large weights for them, are gone (QuaRot, arXiv 2404.00456, section 3; SpinQuant, arXiv
2405.16406, equation 3 and figure 1; QuIP#, arXiv 2402.04396, lemma 3.1). Where no Hadamard matrix of order n is known here, n
= 2^k m, `H` is the Kronecker product of Sylvester's of order 2^k and a random orthogonal matrix of order m. A random one (Haar,
from the QR decomposition of a Gaussian matrix with the signs of R's diagonal) spreads less evenly and costs more.

Rows are multiplied in `k + m` operations an entry where H is such a product, in n where it is random.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from vlmcompress.numerics import hadamard

Kind = Literal["hadamard", "random"]
KINDS: tuple[Kind, ...] = ("hadamard", "random")
_SEEDS = 2**63
_ROWS = 8192
"""Rows that are multiplied at once: an embedding is large, and its intermediate values are as large again."""


class Rotation:
    """An orthogonal matrix `R [n, n]`, the same for equal arguments on every machine."""

    def __init__(self, kind: Kind, n: int, seed: int, index: int = 0):
        """Draw the matrix.

        Args:
            kind: `hadamard` or `random`.
            n: its size.
            seed, index: a seed, and which of its matrices.
        """
        if kind not in KINDS:
            raise ValueError(f"a rotation is {' or '.join(KINDS)}, not '{kind}'")
        draw = torch.Generator().manual_seed((seed * 1_000_003 + index * 7_919 + 1) % _SEEDS)
        self.n, self.signs = n, torch.ones(n, dtype=torch.float64)
        if kind == "random":
            self.power, self.factor = 1, _haar(n, draw)
            return
        factors = hadamard.split(n)
        self.power, order = factors or (hadamard.even_part(n), n // hadamard.even_part(n))
        self.factor = hadamard.base(order) / math.sqrt(order) if factors else _haar(order, draw)  # [order, order]
        self.signs = torch.randint(0, 2, (n,), generator=draw, dtype=torch.float64) * 2 - 1

    def rows(self, x: Tensor) -> Tensor:
        """Multiply rows `[..., n]` by R, in the type of `x` and where it is."""
        flat, signs, factor = x.reshape(-1, self.n), self.signs.to(x), self.factor.to(x)
        made = torch.empty_like(flat)
        for first in range(0, len(flat), _ROWS):
            some = flat[first : first + _ROWS] * signs
            parts = some.reshape(len(some), self.power, -1) @ factor
            spread = hadamard.transform(parts.transpose(1, 2)).transpose(1, 2) / math.sqrt(self.power)
            made[first : first + _ROWS] = spread.reshape(some.shape)
        return made.reshape(x.shape)

    def columns(self, x: Tensor) -> Tensor:
        """Multiply a matrix `[n, columns]` by R transposed from the left: what writes `y` then writes `y R`."""
        return self.rows(x.transpose(-1, -2)).transpose(-1, -2)

    def matrix(self) -> Tensor:
        """R itself, `[n, n]`, float64."""
        return self.rows(torch.eye(self.n, dtype=torch.float64))


def _haar(n: int, draw: torch.Generator) -> Tensor:
    """A random orthogonal matrix `[n, n]`, float64."""
    q, r = torch.linalg.qr(torch.randn(n, n, generator=draw, dtype=torch.float64))
    return (q * r.diagonal().sign()).contiguous()
