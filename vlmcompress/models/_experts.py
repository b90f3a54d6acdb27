"""Experts of a mixture, each with linear layers of its own.

transformers 5 keeps the experts of a block as two tensors, `gate_up_proj [experts, 2 * width, in]` and `down_proj
[experts, in, width]`, in which no layer can be found, observed or replaced. Here each expert is a module with `gate_proj`,
`up_proj` and `down_proj`, the names that vLLM looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Expert(nn.Module):
    """One expert: `down(act(gate(x)) * up(x))`.

    Attributes:
        rows: while it runs, which of the block's tokens `[tokens]` it was given; else None.
    """

    def __init__(self, width: int, inner: int, act: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(width, inner, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(inner, width, bias=False, dtype=dtype)
        self.act_fn = act
        self.rows: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The expert's output for `x [n, width]`."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleList):
    """The experts of one block, `experts.0`, `experts.1` and so on.

    Attributes:
        all_tokens: every expert is given all tokens, so that calibration sees enough of them. What the router left out does not
            enter the output.
    """

    all_tokens = False

    @property
    def width(self) -> int:
        """Channels of the input."""
        first: Any = self[0]
        return first.gate_proj.in_features

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs, as the fused module of transformers computes it.

        Args:
            hidden_states: `[tokens, width]`.
            top_k_index: `[tokens, k]`, the experts of each token.
            top_k_weights: `[tokens, k]`, their weights.
        """
        output = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            rows, place = torch.where(top_k_index == number)
            given = torch.arange(len(hidden_states), device=hidden_states.device) if self.all_tokens else rows
            if not len(given):
                continue
            expert.rows = given
            try:
                made = expert(hidden_states[given])
            finally:
                expert.rows = None
            made = made[rows] if self.all_tokens else made
            made = made * top_k_weights[rows, place, None]
            output.index_add_(0, rows, made.to(output.dtype))
        return output
