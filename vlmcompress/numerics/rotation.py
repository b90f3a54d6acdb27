"""Rotations: multiply rows by an orthogonal matrix, a Hadamard matrix with random signs or a random one.

Multiplying by `R = diag(s) H / sqrt(n)`, s random signs, spreads the value of one channel evenly over all n, which removes
outlier channels and their large weights (QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406, section 3.1; QuIP#, arXiv
2402.04396, section 3). For an order n = 2^k m without a Hadamard matrix in this file, `H` is the Kronecker product of
Sylvester's matrix of order 2^k and a random orthogonal matrix of order m. A random matrix (Haar, from the QR decomposition of
a Gaussian matrix with the signs of R's diagonal) spreads less evenly and costs more.

Multiplying a row takes `k + m` operations per entry where H is such a product, n where it is random.

A Hadamard matrix has entries 1 and -1 and orthogonal rows. Here they are Sylvester's doublings of one of Paley's (1933).
For a prime q, `chi(a)` is 1 for squares modulo q, -1 for others and 0 for 0, and `Q_ij = chi(i - j)`. With `S` that
matrix bordered by ones (`-1` on the left where q is 3 modulo 4), Paley's first construction is `I + S` of order q + 1 for q = 3
modulo 4; the second one puts `[[1, 1], [1, -1]]` for entries 1, its negative for -1, and `[[1, -1], [-1, -1]]` on the diagonal
of `S`, of order 2 (q + 1), for q = 1 modulo 4. A matrix of order n gives one of order 2n: `[[H, H], [H, -H]]`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["hadamard", "random"]
KINDS: tuple[Kind, ...] = ("hadamard", "random")
_SEEDS = 2**63
_ROWS = 8192
"""Rows multiplied at a time: an embedding is large, and so are its temporaries."""


class Rotation:
    """An orthogonal matrix `R [n, n]`; equal arguments give the same matrix on every machine."""

    def __init__(self, kind: Kind, n: int, seed: int, index: int = 0):
        """Draw the matrix.

        Args:
            kind: `hadamard` or `random`.
            n: size of the matrix.
            seed, index: seed, and number of the matrix among those of this seed.
        """
        if kind not in KINDS:
            raise ValueError(f"a rotation is {' or '.join(KINDS)}, not '{kind}'")
        draw = torch.Generator().manual_seed((seed * 1_000_003 + index * 7_919 + 1) % _SEEDS)
        self.n, self.signs = n, torch.ones(n, dtype=torch.float64)
        if kind == "random":
            self.power, self.factor = 1, _haar(n, draw)
            return
        factors = hadamard_factors(n)
        # H is the Kronecker product of Sylvester's [power, power] and `factor`, which is orthogonal already.
        self.power, order = factors or (even_part(n), n // even_part(n))
        self.factor = hadamard_matrix(order) / math.sqrt(order) if factors else _haar(order, draw)  # [order, order]
        self.signs = torch.randint(0, 2, (n,), generator=draw, dtype=torch.float64) * 2 - 1

    def rows(self, x: Tensor) -> Tensor:
        """Multiply rows `[..., n]` by R; dtype and device are those of `x`."""
        flat, signs, factor = x.reshape(-1, self.n), self.signs.to(x), self.factor.to(x)
        rotated = torch.empty_like(flat)
        for first in range(0, len(flat), _ROWS):
            # x diag(s) H / sqrt(n): of x as a matrix [power, order], Sylvester's factor acts on columns, the other on rows.
            some = flat[first : first + _ROWS] * signs
            parts = some.reshape(len(some), self.power, -1) @ factor
            spread = hadamard_transform(parts.transpose(1, 2)).transpose(1, 2) / math.sqrt(self.power)
            rotated[first : first + _ROWS] = spread.reshape(some.shape)
        return rotated.reshape(x.shape)

    def columns(self, x: Tensor) -> Tensor:
        """Multiply a matrix `[n, columns]` by R^T from the left: a layer with this weight and output `y` then outputs `y
        R`."""
        return self.rows(x.transpose(-1, -2)).transpose(-1, -2)

    def matrix(self) -> Tensor:
        """R itself, `[n, n]`, float64."""
        return self.rows(torch.eye(self.n, dtype=torch.float64))


def _haar(n: int, draw: torch.Generator) -> Tensor:
    """A random orthogonal matrix `[n, n]`, float64."""
    q, r = torch.linalg.qr(torch.randn(n, n, generator=draw, dtype=torch.float64))
    return (
        q * r.diagonal().sign()
    ).contiguous()  # QR is unique, and q uniformly distributed, where r's diagonal is positive


def hadamard_factors(n: int) -> tuple[int, int] | None:
    """`(2^k, m)` with `2^k m = n` and m the smallest order for which `hadamard_matrix` works; None if there is none."""
    return next(((power, n // power) for power in _powers(n) if _paley(n // power) is not None), None)


def even_part(n: int) -> int:
    """The largest power of two that divides n."""
    return _powers(n)[0]


def hadamard_matrix(m: int) -> Tensor:
    """The Hadamard matrix `[m, m]`, float64, for an order from `hadamard_factors`. Raises `ValueError` for other orders."""
    matrix = _paley(m)
    if matrix is None:
        raise ValueError(f"no construction of a Hadamard matrix of order {m} is known")
    return matrix.clone()


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply rows `[..., 2^k]` by Sylvester's matrix `[2^k, 2^k]`, in k passes. Raises ValueError for other lengths."""
    n, shape = x.shape[-1], x.shape
    if n & (n - 1):
        raise ValueError(f"rows have {n} entries; give a power of two")
    step = 1
    while step < n:
        # H_2k = [[H_k, H_k], [H_k, -H_k]]: pairs of blocks of `step` entries become their sum and their difference.
        a, b = x.reshape(-1, n // (2 * step), 2, step).unbind(2)
        x = torch.stack((a + b, a - b), 2)
        step *= 2
    return x.reshape(shape)


def _powers(n: int) -> list[int]:
    """The powers of two that divide n, largest first."""
    if n < 1:
        raise ValueError(f"the size is {n}; give at least 1")
    return [1 << k for k in range((n & -n).bit_length())][::-1]


@cache
def _paley(m: int) -> Tensor | None:
    """A Hadamard matrix of order m, trivial for 1, else by one of Paley's constructions; None where neither applies."""
    if m == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if m % 4 == 0 and _prime(m - 1):  # Paley's first construction, q = m - 1 = 3 modulo 4
        return torch.eye(m, dtype=torch.float64) + _bordered(m - 1, -1.0)
    q = m // 2 - 1
    if m % 4 == 0 and q % 4 == 1 and _prime(q):  # the second one, of order 2 (q + 1)
        s = _bordered(q, 1.0)
        plain = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(s, plain) + torch.kron(torch.eye(q + 1, dtype=torch.float64), diagonal)
    return None


def _bordered(q: int, left: float) -> Tensor:
    """Paley's `S [q + 1, q + 1]`: zero on the diagonal, 1 in the first row, `left` in the first column."""
    # Of a prime q: `chi` is Legendre's symbol, and Q_ij = chi(i - j) a circulant matrix.
    squares = {i * i % q for i in range(1, q)}
    chi = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)], dtype=torch.float64)
    index = torch.arange(q)
    s = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    s[0, 1:], s[1:, 0] = 1.0, left
    s[1:, 1:] = chi[(index[:, None] - index[None, :]) % q]
    return s


def _prime(q: int) -> bool:
    return q > 1 and all(q % p for p in range(2, int(q**0.5) + 1))
