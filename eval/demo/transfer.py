"""Start one demo model's language model and oracle from another's training state.

Both have the same shapes. They differ in the biases (Qwen has them, they start at zero), the positions (1-D or M-RoPE) and
the token ids (mapped by the token's text). The skills carry over; a short language stage adapts them.
"""

import torch
from torch import nn


@torch.no_grad()
def adopt(learner: nn.Module, tokenizer, state: dict, donor_tokenizer) -> list[str]:
    """Copy what fits from a donor's ``state.pt`` into ``learner``; returns the names that were copied."""
    donor = dict(state["learner"])
    donor |= {f"model.{name}": value for name, value in state["ema"].items()}
    weights, copied = learner.state_dict(), []
    theirs = donor_tokenizer.get_vocab()
    pairs = [
        (index, theirs[name])
        for token, index in tokenizer.get_vocab().items()
        if (name := _counterpart(token, theirs)) is not None
    ]
    mine, other = (torch.tensor(column) for column in zip(*pairs, strict=True))
    for name, value in weights.items():
        if "language_model" not in name and not name.startswith(("oracle", "model.lm_head")):
            continue
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            value[mine] = donor[name][other].to(value.dtype)
        elif name in donor:
            value.copy_(donor[name])
        elif name.endswith("proj.bias"):
            value.zero_()
        else:
            continue
        copied.append(name)
    return copied


STAND_INS = {"<|im_end|>": "</s>", "assistant": "ASSISTANT", "user": "USER"}


def _counterpart(token: str, theirs: dict[str, int]) -> str | None:
    """The donor's token that plays the part of ``token``: an answer's first word has a leading space there."""
    candidates = (STAND_INS.get(token, ""), "\u0120" + token if token.isalnum() else "", token)
    return next((name for name in candidates if name in theirs), None)
