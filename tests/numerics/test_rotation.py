"""Rotations are orthogonal, and applied fast as their dense product applies them."""

from __future__ import annotations

import pytest
import torch

from vlmcompress.numerics.rotation import KINDS, Rotation, hadamard_factors, hadamard_matrix, hadamard_transform

SIZES = (1, 3, 9, 64, 72, 80, 96, 128, 576, 896, 960, 1152, 27 * 4)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_is_orthogonal(kind, n):
    matrix = Rotation(kind, n, seed=3).matrix()
    assert (matrix @ matrix.T - torch.eye(n, dtype=torch.float64)).abs().max() < 1e-6


@pytest.mark.parametrize("n", [n for n in SIZES if n not in (3, 9)])
def test_hadamard_has_entries_of_one_size(n):
    """All sizes of heads and hidden states of published models that are looked at here have a true Hadamard matrix."""
    power, order = hadamard_factors(n)
    assert power * order == n
    matrix = Rotation("hadamard", n, seed=0).matrix() * n**0.5
    assert torch.allclose(matrix.abs(), torch.ones(n, n, dtype=torch.float64))


def test_order_without_a_hadamard_matrix_is_a_product():
    """92 = 4 * 23 is no order of Paley's: Sylvester's of order 4 times a random matrix of order 23."""
    assert hadamard_factors(92) is None
    rotation = Rotation("hadamard", 92, seed=1)
    unsigned = rotation.signs[:, None] * rotation.matrix()
    sylvester = hadamard_transform(torch.eye(4, dtype=torch.float64)) / 2
    assert torch.allclose(unsigned, torch.kron(sylvester, rotation.factor))


@pytest.mark.parametrize("m", [1, 4, 12, 20, 28, 36, 60])
def test_base_is_a_hadamard_matrix(m):
    matrix = hadamard_matrix(m)
    assert set(matrix.unique().tolist()) <= {-1.0, 1.0}
    assert torch.equal(matrix @ matrix.T, m * torch.eye(m, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_fast_is_the_dense_product(kind):
    rotation = Rotation(kind, 576, seed=5)
    x = torch.randn(7, 2, 576, dtype=torch.float64)
    assert torch.allclose(rotation.rows(x), x @ rotation.matrix(), atol=1e-10)
    w = torch.randn(576, 5, dtype=torch.float64)
    assert torch.allclose(rotation.columns(w), rotation.matrix().T @ w, atol=1e-10)
    assert torch.allclose(rotation.rows(x.float()).double(), rotation.rows(x), atol=1e-5)
    many = torch.randn(10_000, 8, dtype=torch.float64)  # in two parts
    assert torch.allclose(Rotation(kind, 8, seed=5).rows(many), many @ Rotation(kind, 8, seed=5).matrix(), atol=1e-10)


def test_sylvester_is_the_recursion():
    """`[[H, H], [H, -H]]`, from `[1]` on."""
    slow = torch.ones(1, 1)
    for _ in range(5):
        slow = torch.cat((torch.cat((slow, slow), 1), torch.cat((slow, -slow), 1)))
    assert torch.equal(hadamard_transform(torch.eye(32)), slow)


def test_seeds_and_numbers_draw_apart():
    first = Rotation("hadamard", 64, seed=0).matrix()
    assert torch.equal(first, Rotation("hadamard", 64, seed=0).matrix())
    others = [Rotation("hadamard", 64, seed=1), Rotation("hadamard", 64, seed=0, index=1), Rotation("random", 64, 0)]
    assert not any(torch.allclose(first, other.matrix()) for other in others)
    Rotation("random", 4, seed=2**63 - 1)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="hadamard or random"):
        Rotation("walsh", 8, 0)
    with pytest.raises(ValueError, match="power of two"):
        hadamard_transform(torch.ones(3))
    with pytest.raises(ValueError, match="at least 1"):
        hadamard_factors(0)
    with pytest.raises(ValueError, match="order 92"):
        hadamard_matrix(92)
