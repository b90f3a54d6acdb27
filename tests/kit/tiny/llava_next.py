"""Tiny LLaVA-NeXT: at most 2x2 tiles of 56x56."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import TEXT, chat_template, tokenizer
from tests.kit.tiny.llava import CLIP, RENAME, SIZE

__all__ = ["RENAME", "model", "processor"]
PINPOINTS = [[SIZE, 2 * SIZE], [2 * SIZE, SIZE], [2 * SIZE, 2 * SIZE]]


def model() -> T.PreTrainedModel:
    return T.LlavaNextForConditionalGeneration(
        T.LlavaNextConfig(
            vision_config=T.CLIPVisionConfig(**CLIP),
            text_config=T.MistralConfig(**TEXT, head_dim=32, architectures=["MistralForCausalLM"]),
            image_grid_pinpoints=PINPOINTS,
            image_token_index=259,
            image_seq_length=16,
        )
    )


def image_processor() -> T.LlavaNextImageProcessor:
    return T.LlavaNextImageProcessor(
        size={"shortest_edge": SIZE},
        crop_size={"height": SIZE, "width": SIZE},
        image_grid_pinpoints=PINPOINTS,
    )


def processor() -> T.ProcessorMixin:
    return T.LlavaNextProcessor(
        image_processor=image_processor(),
        tokenizer=tokenizer("<image>", image_token="<image>"),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=chat_template("<image>"),
    )
