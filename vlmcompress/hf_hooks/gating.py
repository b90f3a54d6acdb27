"""Gates that let a selection be trained: what is kept is exact, what would change it is estimated.

Forward, a token's gate is 1 where it is chosen for its worth, else 0: just what the language model will get. Backward, it is
`sigmoid((worth - level) / temperature)`, with the level at which these add up to as many as are chosen (a straight-through
estimator, Bengio et al., arXiv 1308.3432). Attention weighs each key by its gate,

    out_i = sum_j gate_j exp(q_i k_j) v_j / sum_j gate_j exp(q_i k_j)

so that a token that is left out, too, has a gradient: what a little of it would change. A bias of `log(gate)` on the logits,
which is the same forward, has none there; and gates between 0 and 1 forward would let through a little of every token.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 40  # of the bisection
STEEP = 20.0
"""By how much, at most, a closed key's logit counts as above the open ones: what it would change stays a finite number."""


def level(worth: Tensor, count: int, temperature: float) -> Tensor:
    """Find the level at which `sigmoid((worth - level) / temperature)` adds up to `count`, a scalar; by bisection."""
    low, high = worth.min() - 20 * temperature, worth.max() + 20 * temperature
    for _ in range(STEPS):
        middle = (low + high) / 2
        above = torch.sigmoid((worth - middle) / temperature).sum() > count
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def standard(worth: Tensor) -> Tensor:
    """Bring `worth [n]` to mean 0 and spread 1, so that its scale does not matter."""
    return (worth - worth.mean()) / (worth.std(correction=0) + 1e-6)


def gates(values: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """Gates of an image's tokens, `[n]`: ones at `chosen` and zeros, with the gradient of a soft selection of as many.

    Args:
        values: `[n]`, worths in units of their spread (`standard`).
        chosen: `[k]`, indices of what is kept.
        temperature: of the soft selection, in the same units.
    """
    soft = torch.sigmoid((values - level(values.detach(), len(chosen), temperature)) / temperature)
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
    behind = torch.arange(t, device=logits.device) - torch.arange(t - s, t, device=logits.device)[:, None]
    if mask is None:
        logits = logits.masked_fill(behind > 0, -torch.inf)
    elif mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask[..., :t], -torch.inf)
    else:
        logits = logits + mask[..., :t].float()
    weight = torch.where(behind == 0, torch.ones_like(gate[:1, None]), gate[:, None])[:, None]
    # The largest of what is open, which always has a part: where a closed key is far above all others, they would round to 0.
    most = logits.detach().masked_fill(weight == 0, -torch.inf).amax(-1, keepdim=True)
    parts = torch.exp((logits - most).clamp(max=STEEP)) * weight
    return (parts @ wide / parts.sum(-1, keepdim=True)).to(value.dtype)
