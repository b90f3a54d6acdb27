"""The divergence of reported first tokens against that of whole distributions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import entropy

from vlmcompress.evaluation.compare import divergence, kl


def top(probabilities: np.ndarray, k: int) -> dict[str, float]:
    best = np.argsort(-probabilities)[:k]
    return {f"t{i}": float(np.log(probabilities[i])) for i in best}


def test_all_tokens_reported() -> None:
    """Oracle: scipy's relative entropy."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(8, 0.5), 2)
    assert kl(top(p, 8), top(q, 8)) == pytest.approx(entropy(p, q))
    assert kl(top(p, 8), top(p, 8)) == 0.0


@pytest.mark.parametrize("k", [1, 2, 5, 20, 50])
def test_few_tokens_give_a_lower_bound_that_rises(k) -> None:
    """Never above the divergence of the whole distributions; with more tokens it comes closer."""
    rng = np.random.default_rng(k)
    for _ in range(50):
        p = rng.dirichlet(np.full(50, 0.1))
        q = 0.8 * p + 0.2 * rng.dirichlet(np.full(50, 0.1))
        p, q = (side + 1e-6 for side in (p, q))
        p, q = p / p.sum(), q / q.sum()
        true = float(entropy(p, q))
        assert 0 <= kl(top(p, k), top(q, k)) <= true + 1e-9
        if k == 50:
            assert kl(top(p, k), top(q, k)) == pytest.approx(true, abs=1e-6)


def test_nothing_in_common_is_finite() -> None:
    """All of the baseline's probability is on a token that the candidate doesn't report: large, but a number."""
    value = kl({"a": -1e-12}, {"b": -1e-12})
    assert 0 <= value < 25


def test_summary() -> None:
    """By hand: two equal samples, one that moved, two that are not known."""
    same, moved = {"a": np.log(0.9), "b": np.log(0.1)}, {"a": np.log(0.1), "b": np.log(0.9)}
    summary, values = divergence([same, same, same, None, same], [same, same, moved, same, {}])
    expected = 0.8 * np.log(9)
    assert values == [0.0, 0.0, pytest.approx(expected), None, None]
    assert summary is not None
    assert (summary.n, summary.median, summary.same_first) == (3, 0.0, pytest.approx(2 / 3))
    assert summary.mean == pytest.approx(expected / 3)
    assert summary.p95 == pytest.approx(0.9 * expected)
    assert divergence([None], [same]) == (None, [None])


def test_sides_must_be_as_long() -> None:
    with pytest.raises(ValueError):
        divergence([None], [])
