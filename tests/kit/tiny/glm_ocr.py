"""Tiny GLM-OCR: patches of 14x14 merged 2x2, norms on the tower's queries and keys."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA
from tests.kit.tiny.glm4v import ROPE, TOKEN_IDS, VISION
from tests.kit.tiny.glm4v import processor as processor


def model() -> T.PreTrainedModel:
    return T.GlmOcrForConditionalGeneration(
        T.GlmOcrConfig(
            text_config={
                **GQA,
                "intermediate_size": 384,
                "rope_parameters": ROPE,
            },  # vLLM reads it as the merger's width
            vision_config=VISION,
            tie_word_embeddings=False,
            **TOKEN_IDS,
        )
    )
