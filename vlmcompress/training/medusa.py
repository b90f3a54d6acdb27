"""Medusa (arXiv 2401.10774): heads that predict a model's next tokens from its last hidden state, one position each.

With `h_t` the input of the target's output head at position t, head s predicts the token s + 1 positions after the one that
the target itself predicts there:

    softmax(W_out (h_t + SiLU(A_s h_t)))

A guess does not depend on earlier guesses. All heads share one output head, over the draft's own vocabulary. This is the form
that vLLM 0.32 serves (`model_executor/models/medusa.py`), which takes each head's most likely token instead of a tree. vLLM
0.33 has removed Medusa: this file can be deleted when support for 0.32 ends, with everything that names it
(`plugin/_fixes.py`, the branches for the kind in `draft`, `draft_data`, `draft_tensors` and `draft_folder`).
Cost: a hidden-size matrix product per guess, besides the output head. Loses: dependence on earlier guesses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from vlmcompress.export import draft_tensors
from vlmcompress.training.eagle3 import STEPS, DraftSample


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of the heads: the target's `hidden` width, and the number of tokens they can predict; there are no `taps`."""

    hidden: int
    vocabulary: int
    taps: tuple[int, ...] = ()

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of all that is trained, by the names on disk."""
        return draft_tensors.medusa(hidden=self.hidden, vocabulary=self.vocabulary, heads=STEPS)


def create(shape: MedusaShape, head: Tensor) -> dict[str, Tensor]:
    """Initial values, float32: each head predicts the target's token. `head`: rows `[vocabulary, hidden]` of its output
    head."""
    tensors = {name: torch.zeros(size) for name, size in shape.tensors().items()}
    tensors["lm_head.weight"] = head.float().clone()
    return tensors


def config(shape: Any, words: int, model: Any) -> dict[str, Any]:
    """The content of config.json. `words`: vocabulary size of the target `model`."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "vocab_size": words,
        "truncated_vocab_size": shape.vocabulary,
        "num_heads": STEPS,
        "num_hidden_layers": 1,
        "original_lm_head": True,  # one output head for all of them
        "max_position_embeddings": model.config.get_text_config().max_position_embeddings,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def guesses(tensors: Mapping[str, Tensor], sample: DraftSample) -> list[Tensor]:
    """The logits of each head at the answer positions.

    Returns:
        For each head s the logits `[n, vocabulary]` for the token at each answer position, predicted from the target's hidden
        state s + 1 positions before.
    """
    count = len(sample.logits)
    logits = []
    for step in range(STEPS):
        # `last` begins STEPS positions before the first answer position, and head s reads s + 1 positions before its guess.
        states = sample.last[STEPS - step - 1 :][:count]
        states = states + silu(linear(states, tensors[f"blocks.{step}.layers.0.weight"]))
        logits.append(linear(states, tensors["lm_head.weight"]))
    return logits
