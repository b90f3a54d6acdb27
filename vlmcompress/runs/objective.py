"""The training objective: Kullback-Leibler divergence of the student's next-token distribution from the teacher's.

`KL(p || q) = sum_i p_i (log p_i - log q_i)` in nats, the mean over a sample's answer tokens. The teacher's distribution `p` is
computed once and kept. Of a vocabulary of up to `WHOLE` tokens all of it is kept, and the divergence is exact. Of a larger one
the `TOP` most likely tokens are kept, and all others together are one more outcome with the mass that is left: the divergence
between these coarser distributions, which is never more than the exact one, and zero where that is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

WHOLE = 1024
TOP = 64
_LEAST = 1e-7  # of a mass that is left: a smaller one is what rounding leaves


def targets(logits: Tensor, whole: int = WHOLE, top: int = TOP) -> dict[str, Tensor]:
    """A teacher's log-probabilities to train by, of `logits [tokens, vocabulary]`.

    Args:
        whole: the largest vocabulary of which everything is kept.
        top: how many tokens are kept of a larger one.

    Returns:
        `logs [tokens, vocabulary]` float32, log-probabilities; or `logs [tokens, top]`, and `ids [tokens, top]` int32.
    """
    logs = logits.float().log_softmax(-1)
    if logits.shape[-1] <= whole:
        return {"logs": logs.contiguous()}
    values, ids = logs.topk(top, -1)
    return {"logs": values.contiguous(), "ids": ids.int().contiguous()}


def divergence(kept: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """The divergence of a student's `logits [tokens, vocabulary]` from what `targets` kept: a scalar in nats, float32.

    Raises:
        ValueError: the two are of different numbers of tokens.
    """
    teacher = kept["logs"].to(logits.device)
    if len(teacher) != len(logits):
        raise ValueError(f"the teacher has {len(teacher)} answer tokens, the student {len(logits)}")
    student = logits.float().log_softmax(-1)
    if "ids" not in kept:
        return (teacher.exp() * (teacher - student)).sum(-1).mean()
    ids = kept["ids"].to(logits.device).long()
    kept_logs = student.gather(-1, ids)
    loss = (teacher.exp() * (teacher - kept_logs)).sum(-1)
    left = 1 - teacher.exp().sum(-1)  # the mass of all other tokens
    others = student.scatter(-1, ids, float("-inf")).logsumexp(-1)
    rest = left * (left.clamp_min(_LEAST).log() - others)
    return (loss + torch.where(left > _LEAST, rest, torch.zeros_like(rest))).mean()
