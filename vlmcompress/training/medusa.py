"""Medusa (arXiv 2401.10774): heads that guess a model's next tokens from its last hidden state, each of them another one.

With `h_t` what the target's output head reads at position t, head s guesses the token s + 1 places after the one that the
target itself says there:

    softmax(W_out (h_t + SiLU(A_s h_t)))

A guess knows nothing of the ones before it. The output head is one for all, and over a vocabulary of the draft's own. This is
the form that vLLM 0.32 serves (`model_executor/models/medusa.py`), which takes the likeliest guess of each head and no tree.
vLLM 0.33 has no Medusa any more: this file goes with the support of 0.32, and with it what names it (`plugin/_medusa.py`, the
branches for the kind in `draft`, `draft_lessons`, `draft_write` and `draft_folder`).
Cost: a product of the hidden size a guess, next to the output head. Loses: what depends on the guesses before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from vlmcompress.export import draft_tensors
from vlmcompress.training.eagle3 import STEPS, Lesson


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of the heads: the target's `hidden` width, and how many tokens they can guess; there are no `taps`."""

    hidden: int
    vocabulary: int
    taps: tuple[int, ...] = ()

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of all that is trained, by the names on disk."""
        return draft_tensors.medusa(hidden=self.hidden, vocabulary=self.vocabulary, heads=STEPS)


def create(shape: MedusaShape, head: Tensor) -> dict[str, Tensor]:
    """First values, float32: each head says what the target says. `head`: rows `[vocabulary, hidden]` of its output head."""
    tensors = {name: torch.zeros(size) for name, size in shape.tensors().items()}
    tensors["lm_head.weight"] = head.float().clone()
    return tensors


def config(shape: Any, words: int, model: Any) -> dict[str, Any]:
    """The config.json. `words`: tokens of the target, which is `model`."""
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


def guesses(tensors: Mapping[str, Tensor], lesson: Lesson) -> list[Tensor]:
    """The logits of each head at the answer positions.

    Returns:
        For each head s the logits `[n, vocabulary]` of what stands at each answer position, guessed from the target's hidden
        state s + 1 positions before.
    """
    count = len(lesson.logits)
    logits = []
    for step in range(STEPS):
        # `last` begins STEPS positions before the first answer: head s reads s + 1 positions before what it guesses.
        states = lesson.last[STEPS - step - 1 :][:count]
        states = states + silu(linear(states, tensors[f"blocks.{step}.layers.0.weight"]))
        logits.append(linear(states, tensors["lm_head.weight"]))
    return logits
