"""Gates: exact forward, the gradient of a soft selection backward; attention by gates is attention without what is gated."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from vlmcompress.reduction.hooks.gated import attend, gates, level, standardize


@pytest.mark.parametrize("temperature", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("count", [1, 7, 19])
def test_the_soft_selection_adds_up(count, temperature):
    values = torch.randn(20, generator=torch.Generator().manual_seed(0))
    total = torch.sigmoid((values - level(values, count, temperature)) / temperature).sum()
    assert float(total) == pytest.approx(count, abs=1e-3)


def test_forward_it_is_the_selection_and_backward_the_soft_one():
    values = torch.randn(12, generator=torch.Generator().manual_seed(1)).requires_grad_()
    chosen, weight = torch.tensor([3, 0, 7]), torch.arange(12.0)
    gated = gates(values, chosen, 0.3)
    assert gated.detach().tolist() == [1.0 if i in (0, 3, 7) else 0.0 for i in range(12)]
    (gated * weight).sum().backward()
    soft = torch.sigmoid((values.detach() - level(values.detach(), 3, 0.3)) / 0.3)
    torch.testing.assert_close(values.grad, weight * soft * (1 - soft) / 0.3)


def test_the_scale_of_scores_does_not_matter():
    values = torch.randn(12)
    torch.testing.assert_close(standardize(values), standardize(1000 * values + 5), atol=1e-4, rtol=1e-4)


def parts(heads=4, shared=2, tokens=9, seed=0):
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads, tokens, 8, generator=random)
    key, value = (torch.randn(2, heads // shared, tokens, 8, generator=random) for _ in range(2))
    return query, key, value


def causal(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


@pytest.mark.parametrize("form", ["none", "bool", "numbers"])
def test_closed_gates_hide_tokens(form):
    """Oracle: torch's attention with the hidden keys masked out, every token seeing itself."""
    query, key, value = parts()
    gate = torch.ones(2, 9)
    gate[0, [1, 4]], gate[1, [0, 5, 6]] = 0.0, 0.0
    allowed = causal(9)[None] & (gate[:, None].bool() | torch.eye(9, dtype=torch.bool)[None])
    expected = F.scaled_dot_product_attention(query, key, value, allowed[:, None], enable_gqa=True, scale=0.3)
    mask = {
        "none": None,
        "bool": causal(9)[None, None],
        "numbers": torch.zeros(1, 1, 9, 9).masked_fill(~causal(9), torch.finfo(torch.float32).min),
    }[form]
    torch.testing.assert_close(attend(query, key, value, gate, mask, 0.3), expected, atol=1e-6, rtol=1e-5)


def test_open_gates_change_nothing_for_the_last_tokens_either():
    query, key, value = parts()
    whole = attend(query, key, value, torch.ones(2, 9), None, 0.3)
    torch.testing.assert_close(attend(query[:, :, -3:], key, value, torch.ones(2, 9), None, 0.3), whole[:, :, -3:])


def test_a_closed_gate_has_a_gradient():
    """Oracle: the difference that a little of the token makes."""
    query, key, value = parts(seed=2)
    weight = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(5))
    start = torch.ones(2, 9)
    start[:, [2, 6]] = 0.0

    def total(gate):
        return (attend(query, key, value, gate, None, 0.3) * weight).sum()

    gate = start.clone().requires_grad_()
    total(gate).backward()
    for row, column in ((0, 2), (1, 6), (0, 0), (1, 3)):
        step = torch.zeros(2, 9)
        step[row, column] = 1e-2
        slope = (total(start + step) - total(start - step)) / 2e-2
        assert float(gate.grad[row, column]) == pytest.approx(float(slope), abs=2e-2, rel=2e-2)
    assert gate.grad[0, 2] != 0 and gate.grad[1, 6] != 0


@pytest.mark.parametrize("form", ["none", "bool"])
def test_a_closed_key_with_all_attention_hides_nothing_else(form):
    """Oracle: torch's attention without it. Logits of some hundreds occur; what is 100 below the largest rounds to 0."""
    query, key, value = parts()
    query, key = query.abs(), key.abs()
    key[:, :, 2] *= 1000
    gate = torch.ones(2, 9)
    gate[:, 2] = 0.0
    allowed = (causal(9) & (gate[0].bool() | torch.eye(9, dtype=torch.bool)))[None, None]
    expected = F.scaled_dot_product_attention(query, key, value, allowed, enable_gqa=True, scale=0.3)
    gate, mask = gate.requires_grad_(), None if form == "none" else causal(9)[None, None]
    attended = attend(query, key, value, gate, mask, 0.3)
    torch.testing.assert_close(attended, expected, atol=1e-6, rtol=1e-5)
    attended.square().sum().backward()
    assert gate.grad.isfinite().all() and gate.grad[:, 2].abs().min() > 0
