"""Attach a scorer in training: all tokens stay, and attention weights each by its gate.

In decoders with attention only, masking a token is the same as dropping it, as kept tokens keep their positions. So the scorer
is trained on what will be served.

Gates make a selection trainable: the forward pass is exact, the gradient is an estimate. In the forward pass a token's gate is
1 if its score is chosen, else 0: exactly what the language model will get. In the backward pass it is `sigmoid((score - level)
/ temperature)`, where `level` makes their sum equal to the number of chosen tokens (a straight-through estimator, Bengio et
al., arXiv 1308.3432). Attention weights each key by its gate,

    out_i = sum_j gate_j exp(q_i k_j) v_j / sum_j gate_j exp(q_i k_j)

so that tokens that are left out also have a gradient: the effect of adding a little of them. A bias of `log(gate)` on the
logits gives the same forward pass but no gradient there; and gates between 0 and 1 in the forward pass would let a little of
every token through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlmcompress.models import VLM
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks._attach import Attachment
from vlmcompress.reduction.hooks.tap import replace_kernel
from vlmcompress.reduction.hooks.units import Slots, Unit
from vlmcompress.reduction.methods import Grid, learned
from vlmcompress.utils.errors import UserError

Gate = Callable[[Tensor, Grid], Tensor]
"""A function of an image's tokens `[n, d]` and their grid that returns the gates `[n]`."""


class Gated(Attachment):
    """Gates on the visual tokens of a model. `gate`: computes those of an image; None: all tokens pass."""

    def __init__(self, vlm: VLM) -> None:
        if vlm.spec.mixed_blocks:
            raise UserError(
                f"a scorer is trained by hiding tokens from attention, and decoder blocks of {vlm.spec.family} have "
                f"{vlm.spec.mixed_blocks}; use another reducer, such as coverage"
            )
        self.gate: Gate | None = None
        self._gates: Tensor | None = None
        super().__init__(vlm, ReducerChoice("learned", learned.REDUCER))

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        self._gates = None  # a prompt without images has none
        return super()._begin(module, args, kwargs)

    def _hook(self) -> None:
        layers: Any = self.vlm.model.get_submodule(self.vlm.spec.layers)
        for layer in layers:
            self._undo.append(replace_kernel(layer.self_attn, self._attend))

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        embeds = kwargs["inputs_embeds"]
        if self.gate is not None:
            gates = torch.ones(embeds.shape[:2], device=embeds.device)
            for unit in units:
                unit_gates = self.gate(embeds[unit.row, unit.columns].detach(), unit.grid)
                gates = gates.index_put((torch.full_like(unit.columns, unit.row), unit.columns), unit_gates)
            self._gates = gates
        return kwargs

    def _attend(
        self, _kernel: Any, _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
            raise UserError(
                "a scorer is not trained with this model's attention yet; use another reducer, such as coverage"
            )
        gates = query.new_ones(key.shape[0], key.shape[2], dtype=torch.float32) if self._gates is None else self._gates
        # Attention maps of all blocks would take far more memory than everything else, so backward recomputes each.
        out = checkpoint(attend, query, key, value, gates, mask, kwargs["scaling"], use_reentrant=False)
        return out.transpose(1, 2).contiguous(), None


STEPS = 40  # of the bisection
STEEP = 20.0
"""Largest difference of a closed key's logit to the open ones that is used, so that gradients stay finite."""


def level(scores: Tensor, count: int, temperature: float) -> Tensor:
    """Find the scalar `level` for which `sigmoid((scores - level) / temperature)` sums to `count`, by bisection."""
    low, high = scores.min() - 20 * temperature, scores.max() + 20 * temperature
    for _ in range(STEPS):
        # The sum of gates falls as the level rises. 40 halvings reach float32 precision without synchronizing with the device.
        middle = (low + high) / 2
        above = torch.sigmoid((scores - middle) / temperature).sum() > count
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def standardize(scores: Tensor) -> Tensor:
    """Scale `scores [n]` to mean 0 and standard deviation 1, so that their scale does not matter."""
    return (scores - scores.mean()) / (scores.std(correction=0) + 1e-6)


def gates(values: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """Gates of an image's tokens, `[n]`: ones at `chosen` and zeros, with the gradient of a soft selection of as many.

    Args:
        values: `[n]`, standardized scores (`standardize`).
        chosen: `[k]`, indices of the kept tokens.
        temperature: temperature of the soft selection, in the same units.
    """
    # The level is constant for the gradient: a token gains by raising its score, not by lowering the level.
    soft = torch.sigmoid((values - level(values.detach(), len(chosen), temperature)) / temperature)
    # Straight through: forward the hard choice, backward the gradient of the soft one.
    hard = torch.zeros_like(soft).index_fill(0, chosen, 1.0)
    return hard + (soft - soft.detach())


def attend(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention with keys weighted by their gates.

    Args:
        query: `[b, heads, s, d]`; key, value: `[b, key heads, t, d]`, heads share a key head in equal groups.
        gate: `[b, t]`; a token always sees itself, regardless of its gate.
        mask: `[b or 1, heads or 1, s, t]`, true or 0 where a query may attend, false or a large negative number elsewhere;
            None: the queries are the last `s` of the `t` tokens, and each sees those up to itself.
        scale: factor of the products of queries and keys.

    Returns:
        `[b, heads, s, d]` in the type of `value`, computed in float32.
    """
    shared = query.shape[1] // key.shape[1]
    key, wide = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1).float()
    logits = query.float() @ key.float().transpose(2, 3) * scale
    s, t = logits.shape[2:]
    distance = torch.arange(t, device=logits.device) - torch.arange(t - s, t, device=logits.device)[:, None]
    if mask is None:
        logits = logits.masked_fill(distance > 0, -torch.inf)
    elif mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask[..., :t], -torch.inf)
    else:
        logits = logits + mask[..., :t].float()
    weight = torch.where(distance == 0, torch.ones_like(gate[:1, None]), gate[:, None])[:, None]
    # The maximum over open keys: with a closed key far above all others, these would round to 0.
    most = logits.detach().masked_fill(weight == 0, -torch.inf).amax(-1, keepdim=True)
    parts = torch.exp((logits - most).clamp(max=STEEP)) * weight
    return (parts @ wide / parts.sum(-1, keepdim=True)).to(value.dtype)
