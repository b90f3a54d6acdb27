"""Hadamard matrices: entries 1 and -1, orthogonal rows. Sylvester's doubling of one of Paley's (1933).

For a prime q, `chi(a)` is 1 for squares modulo q, -1 for others and 0 for 0, and `Q_ij = chi(i - j)`. With `S` that matrix
bordered by ones (`-1` on the left where q is 3 modulo 4), Paley's first construction is `I + S` of order q + 1 for q = 3
modulo 4; the second one puts `[[1, 1], [1, -1]]` for entries 1, its negative for -1, and `[[1, -1], [-1, -1]]` on the diagonal
of `S`, of order 2 (q + 1), for q = 1 modulo 4. A matrix of order n gives one of order 2n: `[[H, H], [H, -H]]`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def split(n: int) -> tuple[int, int] | None:
    """`(2^k, m)` with `2^k m = n` and m, as small as there is one here, the order of a Hadamard matrix; None: there is none."""
    return next(((power, n // power) for power in _powers(n) if _paley(n // power) is not None), None)


def even_part(n: int) -> int:
    """The largest power of two that divides n."""
    return _powers(n)[0]


def base(m: int) -> Tensor:
    """The Hadamard matrix `[m, m]`, float64, of an order that `split` gives. Raises `ValueError` for one without."""
    matrix = _paley(m)
    if matrix is None:
        raise ValueError(f"no Hadamard matrix of order {m} is known here")
    return matrix.clone()


def transform(x: Tensor) -> Tensor:
    """Multiply rows `[..., 2^k]` by Sylvester's matrix `[2^k, 2^k]`, in k passes of sums and differences."""
    n, shape = x.shape[-1], x.shape
    if n & (n - 1):
        raise ValueError(f"rows have {n} entries; give a power of two")
    step = 1
    while step < n:
        a, b = x.reshape(-1, n // (2 * step), 2, step).unbind(2)
        x = torch.stack((a + b, a - b), 2)
        step *= 2
    return x.reshape(shape)


def _powers(n: int) -> list[int]:
    """The powers of two that divide n, largest first."""
    if n < 1:
        raise ValueError(f"a size of {n}; give at least 1")
    return [1 << k for k in range((n & -n).bit_length())][::-1]


@cache
def _paley(m: int) -> Tensor | None:
    """A Hadamard matrix of order m: 1, or by one of Paley's constructions; None where neither gives one."""
    if m == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if m % 4 == 0 and _prime(m - 1):
        return torch.eye(m, dtype=torch.float64) + _bordered(m - 1, -1.0)
    q = m // 2 - 1
    if m % 4 == 0 and q % 4 == 1 and _prime(q):
        s = _bordered(q, 1.0)
        plain = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(s, plain) + torch.kron(torch.eye(q + 1, dtype=torch.float64), diagonal)
    return None


def _bordered(q: int, left: float) -> Tensor:
    """Paley's `S [q + 1, q + 1]`: zero on the diagonal, 1 in the first row, `left` in the first column."""
    squares = {i * i % q for i in range(1, q)}
    chi = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)], dtype=torch.float64)
    index = torch.arange(q)
    s = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    s[0, 1:], s[1:, 0] = 1.0, left
    s[1:, 1:] = chi[(index[:, None] - index[None, :]) % q]
    return s


def _prime(q: int) -> bool:
    return q > 1 and all(q % p for p in range(2, int(q**0.5) + 1))
