"""Settings for the real engine on reduced checkpoints, and what is asked of its answers."""

from __future__ import annotations

TOKENS = 8
CACHED = {"enable_prefix_caching": True, "block_size": 32}
CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 4}


def check(found: dict, expected: list[dict]) -> None:
    """Prompts as long as they should be, the same answers one by one and together, the same positions."""
    assert "error" not in found, found["error"]
    for answers in (*found["passes"], found["together"]):
        assert [len(answer["prompt"]) for answer in answers] == [one["prompt"] for one in expected]
        assert [answer["tokens"] for answer in answers] == [one["tokens"] for one in expected]
    for answers in found["passes"]:
        for answer, one in zip(answers, expected, strict=True):
            assert answer["positions"] == one["positions"][answer["cached"] :]
