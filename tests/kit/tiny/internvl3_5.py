"""Tiny InternVL3.5: the tiny InternVL with the decoder of Qwen3, whose queries and keys are normalized."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny import internvl
from tests.kit.tiny._text import GQA
from tests.kit.tiny.internvl import processor

__all__ = ["model", "processor"]


def model() -> T.PreTrainedModel:
    config = internvl.model().config
    text = T.Qwen3Config(**GQA, head_dim=32, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"])
    return T.InternVLForConditionalGeneration(
        T.InternVLConfig(
            vision_config=config.vision_config,
            text_config=text,
            image_token_id=config.image_token_id,
            image_seq_length=config.image_seq_length,
            tie_word_embeddings=False,
        )
    )
