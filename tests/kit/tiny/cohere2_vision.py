"""Tiny Cohere2-Vision: 56x56 tiles in 14x14 patches, joined 2x2 into 4 visual tokens a tile."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer

NAMED = {
    "image_token": "<|IMG_PATCH|>",
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}


def model() -> T.PreTrainedModel:
    return T.Cohere2VisionForConditionalGeneration(
        T.Cohere2VisionConfig(
            vision_config=T.SiglipVisionConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=56,
                patch_size=14,
            ),
            text_config=T.Cohere2Config(
                **GQA,
                sliding_window=64,
                layer_types=["sliding_attention", "full_attention"],
                logit_scale=1.0,
                architectures=["Cohere2ForCausalLM"],
            ),
            alignment_intermediate_size=256,
            image_token_id=259,
        )
    )


def processor() -> T.ProcessorMixin:
    size = {"height": 56, "width": 56}
    return T.Cohere2VisionProcessor(
        image_processor=T.Cohere2VisionImageProcessor(size=size, patch_size=2, max_patches=4),
        tokenizer=tokenizer(*NAMED.values(), **NAMED),
        chat_template=chat_template("<|IMG_PATCH|>"),
    )


RENAME = {"model.vision_tower.": "model.vision_tower.vision_model."}
