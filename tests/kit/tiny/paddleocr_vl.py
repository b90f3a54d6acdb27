"""Tiny PaddleOCR-VL: patches of 14x14, merged 2x2 by the projector."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer

ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}


def model() -> T.PreTrainedModel:
    return T.PaddleOCRVLForConditionalGeneration(
        T.PaddleOCRVLConfig(
            text_config={**GQA, "head_dim": 32, "rope_parameters": ROPE, "tie_word_embeddings": False},
            vision_config={
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 56,
                "patch_size": 14,
            },
            vision_start_token_id=259,
            vision_end_token_id=260,
            image_token_id=261,
            video_token_id=262,
            tie_word_embeddings=False,
        )
    )


def processor() -> T.ProcessorMixin:
    named = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
    return T.PaddleOCRVLProcessor(
        image_processor=T.PaddleOCRVLImageProcessor(size={"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 36}),
        tokenizer=tokenizer("<|IMAGE_START|>", "<|IMAGE_END|>", *named.values(), "<|video_pad|>", **named),
        chat_template=chat_template("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
    )
