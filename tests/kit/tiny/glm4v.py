"""Tiny GLM-4.1V: patches of 14x14 merged 2x2, a decoder whose gate and up are one layer."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, TOWER, chat_template, tokenizer

SPECIALS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
)
TOKEN_IDS = {
    "image_start_token_id": 259,
    "image_end_token_id": 260,
    "image_token_id": 261,
    "video_start_token_id": 262,
    "video_end_token_id": 263,
    "video_token_id": 264,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
VISION = {
    **TOWER,
    "image_size": 56,
    "patch_size": 14,
}
SIZE = {"shortest_edge": 28 * 28 * 4 * 2, "longest_edge": 28 * 28 * 36 * 2}  # of two frames each


def model() -> T.PreTrainedModel:
    return T.Glm4vForConditionalGeneration(
        T.Glm4vConfig(
            # transformers always has the biases, vLLM only where the config says so
            text_config={**GQA, "rope_parameters": ROPE, "attention_bias": True},
            vision_config=VISION,
            tie_word_embeddings=False,
            **TOKEN_IDS,
        )
    )


def processor() -> T.ProcessorMixin:
    return T.Glm4vProcessor(
        image_processor=T.Glm4vImageProcessor(size=SIZE),
        tokenizer=tokenizer(*SPECIALS),
        video_processor=T.Glm4vVideoProcessor(size=SIZE),
        chat_template=chat_template(
            "<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_video|><|video|><|end_of_video|>"
        ),
    )
