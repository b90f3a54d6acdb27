"""Signals at a softmax layer whose outer products are, on average, its Fisher matrix.

Let a model put out the logits `z [v]` of a token, `p = softmax(z)`. To second order a change `dz` costs
`KL(p || softmax(z + dz)) = 1/2 dz^T F dz` with the Fisher matrix `F = diag(p) - p p^T`. What that is at an inner layer needs a
vector `g` with `E[g g^T] = F` to propagate back: `J^T g` then has the second moments `J^T F J`, the Gauss-Newton matrix of the
divergence. With the labels of the data, `g = p - e_label`, this holds only where the data are drawn from the model (the
*empirical* Fisher information). It always holds with random signs `s [v]`, each -1 or 1 with equal chance:

    g = r * s - p <r, s>,      r = sqrt(p)
    E[g g^T] = (D - p r^T) E[s s^T] (D - r p^T) = D^2 - D r p^T - p r^T D + p (r^T r) p^T = diag(p) - p p^T,      D = diag(r)

as `E[s s^T] = 1`, `D r = p` and `r^T r = 1`. Tokens have signs of their own, so that on average products of different tokens
vanish: one backward pass serves all of them. The labels play no part.
"""

from __future__ import annotations

import torch
from torch import Tensor


def signal(logits: Tensor, signs: Tensor) -> Tensor:
    """The signal `g [..., v]` at `logits [..., v]`, float32 or wider, for `signs [..., v]` of -1 and 1 (0: no signal)."""
    p = logits.softmax(-1)
    noise = p.sqrt() * signs
    return noise - p * noise.sum(-1, keepdim=True)  # <r, s> is the sum of r * s


def draw(tokens: int, width: int, seed: int, sample: int) -> Tensor:
    """Signs `[tokens, width]`, int8, that depend on nothing but the seed, the sample's number and the shape."""
    generator = torch.Generator().manual_seed((1_000_003 * seed + sample) % 2**32)  # of more it reads 32 bits on a CPU
    return torch.randint(0, 2, (tokens, width), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
