"""Signals with random signs, against the exact Fisher matrix."""

from __future__ import annotations

import itertools

import torch

from vlmcompress.numerics.statistics.gradients import fisher_signal, random_signs, sign_generator


def exact(logits: torch.Tensor) -> torch.Tensor:
    """The Hessian of `KL(p || softmax(z))` at z = logits, by autograd."""
    p = logits.softmax(-1).detach()
    return torch.autograd.functional.hessian(lambda z: (p * (p.log() - z.log_softmax(-1))).sum(), logits)


def test_the_mean_over_all_signs_is_the_fisher_matrix():
    """Oracle: the Hessian of the divergence. Every choice of signs is taken once, so nothing is left to chance."""
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, -3.0], dtype=torch.float64)
    signs = torch.tensor(list(itertools.product((-1, 1), repeat=5)))
    g = fisher_signal(logits.expand(len(signs), -1), signs)
    torch.testing.assert_close(g.T @ g / len(signs), exact(logits))


def test_drawn_signs_come_near_it():
    """Through a tiny softmax layer: the mean square of what arrives at its input is the diagonal of `J^T F J`, tokens added up,
    as their signs are independent; the sample's number alone tells one draw from another."""
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    expected = sum(head.T @ exact(row @ head.T) @ head for row in x)
    draws = [fisher_signal(x @ head.T, random_signs(2, 6, sign_generator(7, n))).flatten() for n in range(4000)]
    jacobian = torch.cat([head, head])  # both tokens' logits depend on one change of both inputs
    mean = torch.stack(draws) @ jacobian
    torch.testing.assert_close(mean.T @ mean / len(draws), expected, rtol=0.1, atol=0.05)
    whole, source = random_signs(8, 65, sign_generator(7, 1)), sign_generator(7, 1)
    assert torch.equal(whole, torch.cat([random_signs(tokens, 65, source) for tokens in (3, 1, 4)]))
    assert not torch.equal(whole, random_signs(8, 65, sign_generator(7, 2)))
    assert not torch.equal(whole, random_signs(8, 65, sign_generator(8, 1)))
