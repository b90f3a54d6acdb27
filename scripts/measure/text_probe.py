"""How well a quantized language model still predicts English: perplexity, and divergence from the model in 16 bits.

    nll    -log p(token), nats, of every token of a text but the first
    kl     KL(original || quantized) over the whole vocabulary, nats, at every position but the first: there a model has read
           one token only, and many models keep their largest activations there

Of the original only the hidden states after the last norm are kept: `hidden` numbers a token instead of one for each entry of
the vocabulary, and the head, which no method quantizes, makes its logits of them again, exactly. Weights are those of
the checkpoint, arithmetic is float32; activations that an engine quantizes are rounded as it does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from teacher_forcing import language_model, round_activations
from torch import Tensor

from vlmcompress.models import VLM

ROWS = 256  # positions whose logits are held at once
WORDS = 10_000  # least vocabulary of a tokenizer that knows English


@dataclass(frozen=True)
class Reference:
    """The model in 16 bits on some texts: `ids` and `hidden [tokens, hidden]` of each, its `head [vocabulary, hidden]`."""

    ids: list[Tensor]
    hidden: list[Tensor]
    head: Tensor


def tokenized(vlm: VLM, texts: Sequence[str]) -> list[Tensor]:
    """Turn texts into token ids `[tokens]`, as they are: no template, no mark in front."""
    return [torch.tensor(vlm.processor.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def speaks(vlm: VLM) -> bool:
    """Whether the tokenizer knows English; those of the small demo models know the words of their world only."""
    return len(vlm.processor.tokenizer) >= WORDS


@torch.no_grad()
def reference(vlm: VLM, ids: list[Tensor]) -> Reference:
    """Run the model in 16 bits on texts; its weights become float32."""
    return Reference(ids, _hidden(vlm, ids), vlm.model.get_output_embeddings().weight.detach().float().clone())


@torch.no_grad()
def compare(vlm: VLM, original: Reference) -> dict[str, Tensor]:
    """Compute `nll` and `kl` summed over the `tokens` of each text (those that are predicted, as many as are read), float64
    `[texts]`."""
    head = vlm.model.float().get_output_embeddings().weight
    sums = []
    for ids, before, after in zip(original.ids, original.hidden, _hidden(vlm, original.ids), strict=True):
        sums.append((*_sums(ids, before, original.head, after, head), len(ids) - 1))
    return dict(zip(("nll", "kl", "tokens"), torch.tensor(sums, dtype=torch.float64).T.contiguous(), strict=True))


def _sums(ids: Tensor, before: Tensor, head: Tensor, after: Tensor, quantized_head: Tensor) -> tuple[float, float]:
    """Sums of one text, from the last hidden states `[tokens, hidden]` and the heads `[vocabulary, hidden]` of both models."""
    nll = kl = 0.0
    for start in range(0, len(ids), ROWS):
        rows = slice(start, start + ROWS)
        p, q = (before[rows] @ head.T).log_softmax(-1), (after[rows] @ quantized_head.T).log_softmax(-1)
        divergence = (p.exp() * (p - q)).sum(-1).double()
        kl += float(divergence[1 if start == 0 else 0 :].sum())
        labels = ids[start + 1 : start + 1 + ROWS]
        nll -= float(q[: len(labels)].gather(1, labels[:, None]).double().sum())
    return nll, kl


def _hidden(vlm: VLM, ids: list[Tensor]) -> list[Tensor]:
    vlm.model.float()
    inner, hooks = language_model(vlm), round_activations(vlm.model)
    hidden = [inner(input_ids=text_ids[None], use_cache=False).last_hidden_state[0] for text_ids in ids]
    for hook in hooks:
        hook.remove()
    return hidden
