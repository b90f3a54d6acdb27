"""Tiny Qwen3-VL: deepstack from the first ViT block, tied head, one text tower with q/k norms."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, TOWER, chat_template, tokenizer
from tests.kit.tiny.qwen2_5_vl import IMAGE, SPECIALS, TOKEN_IDS, VIDEO


def model() -> T.PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 10000.0, "mrope_interleaved": True}
    return T.Qwen3VLForConditionalGeneration(
        T.Qwen3VLConfig(
            text_config={**GQA, "head_dim": 32, "rope_parameters": rope, "tie_word_embeddings": True},
            vision_config={
                **TOWER,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 256,
            },
            tie_word_embeddings=True,
            **TOKEN_IDS,
        )
    )


def processor() -> T.ProcessorMixin:
    size = {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 36}
    return T.Qwen3VLProcessor(
        image_processor=T.Qwen2VLImageProcessor(patch_size=16, size=size),
        tokenizer=tokenizer(*SPECIALS),
        video_processor=T.Qwen3VLVideoProcessor(size=size),
        chat_template=chat_template(IMAGE, VIDEO),
    )
