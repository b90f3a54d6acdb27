"""Tiny Qwen2.5-VL: window attention in the first of two ViT blocks, grouped-query attention."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, TOWER, chat_template, tokenizer

SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # 259..262
TOKEN_IDS = {
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "image_token_id": 261,
    "video_token_id": 262,
}
ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}  # sums to half of the head size
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def model() -> T.PreTrainedModel:
    return T.Qwen2_5_VLForConditionalGeneration(
        T.Qwen2_5_VLConfig(
            text_config={**GQA, "rope_parameters": ROPE, "tie_word_embeddings": False},
            vision_config={
                **TOWER,
                "fullatt_block_indexes": [1],
                "patch_size": 14,
                "window_size": 56,
            },
            tie_word_embeddings=False,
            **TOKEN_IDS,
        )
    )


def processor() -> T.ProcessorMixin:
    return T.Qwen2_5_VLProcessor(
        image_processor=T.Qwen2VLImageProcessor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 36),
        tokenizer=tokenizer(*SPECIALS),
        video_processor=T.Qwen2VLVideoProcessor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 36),
        chat_template=chat_template(IMAGE, VIDEO),
    )
