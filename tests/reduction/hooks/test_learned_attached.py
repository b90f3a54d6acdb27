"""`learned` on tiny models of every family, and the gates it is trained with against the tokens that are really dropped."""

from __future__ import annotations

import pytest
import torch

from tests.kit.attached_cases import DENSE
from tests.kit.inputs import encode
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.hooks.gated import Gated
from vlmcompress.reduction.methods import Signals, learned
from vlmcompress.utils.errors import UserError

pytestmark = pytest.mark.representatives

FAMILIES = [spec.family for spec in DENSE]
KEEP = 0.4


def network(vlm):
    width = vlm.model.config.get_text_config().hidden_size
    weights = learned.initial(torch.zeros(width), torch.full((width,), 0.05), hidden=8, seed=1)
    return learned.Network(weights | {"value": torch.randn(8, 8, generator=torch.Generator().manual_seed(2))})


def options(vlm):
    return learned.Learned(keep=KEEP, network=network(vlm))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_highest_score_are_kept(family, loaded):
    """The network sees the rows that the language model would get."""
    vlm = loaded(family)
    batch = encode(vlm, 1)
    with torch.no_grad(), attach(vlm, ReducerChoice("learned", options(vlm))) as attached:
        vlm.model(**batch)
        assert attached.reduced_units
        assert all(
            len(unit.reduction.anchor) == max(1, int(KEEP * len(unit.columns) + 0.5)) for unit in attached.reduced_units
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_closed_gates_equal_dropping(family, loaded):
    """Oracle: the logits of the prompt's last token with the same tokens dropped by the attached reducer."""
    vlm = loaded(family)
    if vlm.spec.mixed_blocks:
        with pytest.raises(UserError, match="hiding tokens from attention"):
            Gated(vlm)
        return
    batch, chosen, dtype = encode(vlm, 1), options(vlm), vlm.model.dtype
    vlm.model.double()
    try:
        batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        with torch.no_grad(), attach(vlm, ReducerChoice("learned", chosen)):
            expected = vlm.model(**batch).logits[:, -1]

        def gate(features, grid):
            kept = chosen.reduce(Signals(grid, features=features)).anchor
            return torch.zeros(len(features)).index_fill(0, kept, 1.0)

        with torch.no_grad(), Gated(vlm) as gated:
            open_gates = vlm.model(**batch).logits[:, -1]
            gated.gate = gate
            logits = vlm.model(**batch).logits[:, -1]
        with torch.no_grad():
            whole = vlm.model(**batch).logits[:, -1]
    finally:
        vlm.model.to(dtype)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(open_gates, whole, atol=1e-5, rtol=1e-4)
    assert (expected - whole).abs().max() > 1e-5, "nothing was dropped that matters"
