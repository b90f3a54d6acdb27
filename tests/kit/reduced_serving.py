"""Settings for the real engine on reduced checkpoints, and checks of its answers."""

from __future__ import annotations

TOKENS = 8
CACHED = {"enable_prefix_caching": True, "block_size": 32}
CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
TIE = 1 / 32  # twice the distance of BF16 numbers between 2 and 4, where these models' best logits are


def check(served: dict, expected: list[dict], dtype: str = "float32") -> None:
    """Prompts as long as they should be, the same answers one by one and together, the same positions.

    In BF16 an answer may leave the expected one where its token leads by less than `TIE`; half of all may not.
    """
    assert "error" not in served, served["error"]
    for answers in (*served["passes"], served["together"]):
        assert [len(answer["prompt"]) for answer in answers] == [reference["prompt"] for reference in expected]
        differing = [
            (answer, reference)
            for answer, reference in zip(answers, expected, strict=True)
            if answer["tokens"] != reference["tokens"]
        ]
        assert len(differing) <= (len(expected) // 2 if dtype == "bfloat16" else 0)
        assert all(lead_where_they_part(answer["tokens"], reference) < TIE for answer, reference in differing)
    for answers in served["passes"]:
        for answer, reference in zip(answers, expected, strict=True):
            same = answer["tokens"] == reference["tokens"]
            count = None if same else len(answer["positions"])  # one may end before the other
            assert answer["positions"] == reference["positions"][answer["cached"] :][:count]


def lead_where_they_part(tokens: list[int], expected: dict) -> float:
    """By how much the expected answer's token leads where another answer has another; infinite where one only ends earlier."""
    pairs = zip(tokens, expected["tokens"], expected["leads"], strict=False)
    return next((lead for mine, theirs, lead in pairs if mine != theirs), float("inf"))
