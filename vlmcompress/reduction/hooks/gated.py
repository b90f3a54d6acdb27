"""Attach a scorer in training: all tokens stay, and attention weighs each by its gate.

Hiding a token from attention is the same as dropping it, as kept tokens keep their positions, where the decoder is of attention
alone. So the scorer is trained on what will be served.

Gates let a selection be trained: what is kept is exact, what would change it is estimated.
Forward, a token's gate is 1 where it is chosen for its worth, else 0: just what the language model will get. Backward, it is
`sigmoid((worth - level) / temperature)`, with the level at which these add up to as many as are chosen (a straight-through
estimator, Bengio et al., arXiv 1308.3432). Attention weighs each key by its gate,

    out_i = sum_j gate_j exp(q_i k_j) v_j / sum_j gate_j exp(q_i k_j)

so that a token that is left out, too, has a gradient: what a little of it would change. A bias of `log(gate)` on the logits,
which is the same forward, has none there; and gates between 0 and 1 forward would let through a little of every token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from vlmcompress.models import VLM
from vlmcompress.reduction.hooks._attach import Attachment
from vlmcompress.reduction.hooks.units import Slots, Unit
from vlmcompress.reduction.methods import REGISTRY, Grid
from vlmcompress.utils.errors import UserError

Gate = Callable[[Tensor, Grid], Tensor]
"""A function of an image's tokens `[n, d]` and their grid: the gates `[n]`."""

_NAME = "vlmcompress_gated"


class Gated(Attachment[Slots]):
    """Gates on the visual tokens of a model. `gate`: computes those of an image; None: all tokens pass."""

    def __init__(self, vlm: VLM) -> None:
        if vlm.spec.mixed_blocks:
            raise UserError(
                f"a scorer is trained by hiding tokens from attention, and decoder blocks of {vlm.spec.family} have "
                f"{vlm.spec.mixed_blocks}; use another reducer, such as coverage"
            )
        self.gate: Gate | None = None
        self._gates: Tensor | None = None
        method = REGISTRY.get("learned")
        super().__init__(vlm, method, method.Options())

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        self._gates = None  # a prompt without images has none
        return super()._begin(module, args, kwargs)

    def _hook(self) -> None:
        AttentionInterface.register(_NAME, _run)
        layers: Any = self.vlm.model.get_submodule(self.vlm.spec.layers)
        for layer in layers:
            self._undo.append(self._listen(layer.self_attn))

    def _listen(self, attention: nn.Module) -> Callable[[], None]:
        """Have an attention module of the decoder run `attend`, and return what undoes it."""
        attention_config: Any = attention.config
        config: Any = copy.copy(attention_config)
        config._attn_implementation = _NAME
        attention.config = config
        attention._vlmcompress_gates = lambda: self._gates  # type: ignore[assignment]

        def undo() -> None:
            attention.config = attention_config
            del attention._vlmcompress_gates

        return undo

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        embeds = kwargs["inputs_embeds"]
        if self.gate is not None:
            gates = torch.ones(embeds.shape[:2], device=embeds.device)
            for unit in units:
                unit_gates = self.gate(embeds[unit.row, unit.columns].detach(), unit.grid)
                gates = gates.index_put((torch.full_like(unit.columns, unit.row), unit.columns), unit_gates)
            self._gates = gates
        return kwargs


def _run(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise UserError(
            "a scorer is not trained with this model's attention yet; use another reducer, such as coverage"
        )
    gates = module._vlmcompress_gates()
    if gates is None:
        gates = query.new_ones(key.shape[0], key.shape[2], dtype=torch.float32)
    # Attention maps of all blocks would take far more memory than all else, so backward computes each again.
    out = checkpoint(attend, query, key, value, gates, mask, kwargs["scaling"], use_reentrant=False)
    return out.transpose(1, 2).contiguous(), None


STEPS = 40  # of the bisection
STEEP = 20.0
"""By how much, at most, a closed key's logit counts as above the open ones: what it would change stays a finite number."""


def level(scores: Tensor, count: int, temperature: float) -> Tensor:
    """Find the level at which `sigmoid((worth - level) / temperature)` adds up to `count`, a scalar; by bisection."""
    low, high = scores.min() - 20 * temperature, scores.max() + 20 * temperature
    for _ in range(STEPS):
        # The sum of gates falls as the level rises. 40 halvings reach float32's last bit, without a wait for the device.
        middle = (low + high) / 2
        above = torch.sigmoid((scores - middle) / temperature).sum() > count
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def standardize(scores: Tensor) -> Tensor:
    """Bring `worth [n]` to mean 0 and spread 1, so that its scale does not matter."""
    return (scores - scores.mean()) / (scores.std(correction=0) + 1e-6)


def gates(values: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """Gates of an image's tokens, `[n]`: ones at `chosen` and zeros, with the gradient of a soft selection of as many.

    Args:
        values: `[n]`, worths in units of their spread (`standard`).
        chosen: `[k]`, indices of what is kept.
        temperature: of the soft selection, in the same units.
    """
    # The level is held fixed for the gradient: a token gains by its own worth, not by lowering the bar.
    soft = torch.sigmoid((values - level(values.detach(), len(chosen), temperature)) / temperature)
    # Straight through: forward the hard choice, backward the gradient of the soft one.
    hard = torch.zeros_like(soft).index_fill(0, chosen, 1.0)
    return hard + (soft - soft.detach())


def attend(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention whose keys count as their gates say.

    Args:
        query: `[b, heads, s, d]`; key, value: `[b, key heads, t, d]`, heads share a key head in equal groups.
        gate: `[b, t]`; a token always sees itself, whatever its gate.
        mask: `[b or 1, heads or 1, s, t]`, true or 0 where a query may look, false or a large negative number where not; None:
            the queries are the last `s` of the `t` tokens, and each sees those up to itself.
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
    # The largest of what is open, which always has a part: where a closed key is far above all others, they would round to 0.
    most = logits.detach().masked_fill(weight == 0, -torch.inf).amax(-1, keepdim=True)
    parts = torch.exp((logits - most).clamp(max=STEEP)) * weight
    return (parts @ wide / parts.sum(-1, keepdim=True)).to(value.dtype)
