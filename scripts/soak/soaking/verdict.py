"""Judge whether an answer is the reference's.

Two runs of one model differ in the order of their sums, so where two tokens are nearly equally likely they may choose
differently, and from there on nothing can be compared. A difference is a tie if the reference gave the other token a
log-probability within `margin` of its own choice, else it is a wrong answer. So is a token whose own log-probability is
off by more than that: a model that saw a wrong image or wrong positions and answered right by luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from soaking.client import Choice, Reply

MARGIN = 0.5  # nats; BF16 logits of 16 to 32 are 0.125 apart
TOP = 10  # most likely tokens that the reference reports


@dataclass(frozen=True)
class Verdict:
    """The verdict on a reply. `unseen`: the client hung up before anything came. `deviation`: the largest difference of one
    token's log-probabilities, 0 where none were asked for."""

    answer: Literal["equal", "tie", "wrong", "unseen"]
    why: str = ""
    deviation: float = 0.0


def judge(reply: Reply, reference: Reply, margin: float) -> Verdict:
    """Compare a reply with the reference's, which has one choice with scores; if the client hung up, only the part received."""
    if not reply.choices:
        return Verdict("unseen") if reply.left else Verdict("wrong", "no answer")
    if reply.prompt_tokens and reply.prompt_tokens != reference.prompt_tokens:
        return Verdict("wrong", f"prompt of {reply.prompt_tokens} tokens instead of {reference.prompt_tokens}")
    verdicts = [_choice(choice, reference.choices[0], margin, reply.left) for choice in reply.choices]
    order = ("wrong", "tie", "equal")
    return min(verdicts, key=lambda verdict: order.index(verdict.answer))


def _choice(choice: Choice, reference: Choice, margin: float, left: bool) -> Verdict:
    same = _common(choice.tokens, reference.tokens)
    deviation = max(
        (abs(a - b) for a, b in zip(choice.scores[:same], reference.scores[:same], strict=False)), default=0.0
    )
    if deviation > margin:
        return Verdict("wrong", f"a token's log-probability is off by {deviation:.3g}", deviation)
    if same < min(len(choice.tokens), len(reference.tokens)):
        likely = reference.best[same]
        token = choice.tokens[same]
        gap = max(likely.values()) - likely.get(token, float("-inf"))
        if gap <= margin:
            return Verdict("tie", f"token {same} is less likely by {gap:.3g}", deviation)
        return Verdict("wrong", f"token {same} is {token}, less likely by {gap:.3g}", deviation)
    if len(choice.tokens) > same or (not left and (len(reference.tokens) > same or choice.finish != reference.finish)):
        ends = f"{len(choice.tokens)} tokens ({choice.finish or 'cut'})"
        return Verdict("wrong", f"{ends} instead of {len(reference.tokens)} ({reference.finish})", deviation)
    return Verdict("equal", "", deviation)


def _common(tokens: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(tokens, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other)))
