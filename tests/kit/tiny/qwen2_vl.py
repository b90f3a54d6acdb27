"""Tiny Qwen2-VL: same tokenizer, processor and positions as the tiny Qwen2.5-VL, older tower."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA
from tests.kit.tiny.qwen2_5_vl import ROPE, TOKEN_IDS, processor

__all__ = ["model", "processor"]


def model() -> T.PreTrainedModel:
    return T.Qwen2VLForConditionalGeneration(
        T.Qwen2VLConfig(
            text_config={**GQA, "rope_parameters": ROPE, "tie_word_embeddings": False},
            vision_config={"depth": 2, "embed_dim": 128, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2},
            tie_word_embeddings=False,
            **TOKEN_IDS,
        )
    )
