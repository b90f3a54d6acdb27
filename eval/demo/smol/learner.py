"""Forward passes for training demo-smol's language model: answers, and how far the adapted language has moved."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from .adapter import adapt, adapters
from .sequences import Batch


class Learner(nn.Module):
    """The package's language model off its 4-bit grid, frozen, with adapters that learn; `original` is on the grid still."""

    def __init__(self, language: LlamaForCausalLM, original: LlamaForCausalLM):
        super().__init__()
        self.original = original.requires_grad_(False).eval()
        self.language = language.requires_grad_(False).eval()
        self.layers = language.model.layers
        adapt(self.layers)

    def learned(self) -> dict[str, nn.Parameter]:
        """All that is trained, by the names of the shipped file."""
        lora = adapters(self.layers).items()
        return {f"{name}.{part}": getattr(module, part) for name, module in lora for part in "ab"}

    def answer_logits(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits at the positions before answer tokens, those tokens, and (sequence, turn) of each."""
        hidden = self.language.model(batch.ids, batch.mask(), batch.positions, use_cache=False).last_hidden_state
        target = batch.labels[:, 1:]
        learn = target != -100
        rows = torch.arange(len(target))[:, None].expand_as(target)
        owner = torch.stack([rows[learn], batch.turns[:, 1:][learn] - 1], 1)
        return self.language.lm_head(hidden[:, :-1][learn]), target[learn], owner

    def drift(self, ids: Tensor) -> Tensor:
        """Mean KL divergence, in nats, of the adapted language model from the package's, over texts `ids [n, length]`."""
        with torch.no_grad():
            original = self.original(ids, use_cache=False).logits.log_softmax(-1)
        adapted = self.language(ids, use_cache=False).logits.log_softmax(-1)
        return F.kl_div(adapted, original, log_target=True, reduction="sum") / ids.numel()


@torch.no_grad()
def accuracy(learner: Learner, batches: list[Batch]) -> dict[str, float]:
    """Share of questions by family of which all answer tokens, the stop included, are the most likely ones."""
    right: dict[str, list[bool]] = {}
    for batch in batches:
        logits, target, owner = learner.answer_logits(batch)
        wrong = {tuple(place) for place in owner[logits.argmax(-1) != target].tolist()}
        for row, families in enumerate(batch.families):
            for turn, family in enumerate(families):
                right.setdefault(family, []).append((row, turn) not in wrong)
    return {family: sum(hits) / len(hits) for family, hits in right.items()}
