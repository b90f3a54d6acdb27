"""Tiny LLaVA-OneVision: SigLIP on 56x56 tiles, tied head, grouped-query attention."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer
from tests.kit.tiny.llava_next import PINPOINTS, SIZE

SIGLIP = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 14,
    "vision_use_head": False,
}
RENAME = {"vision_tower.": "vision_tower.vision_model."}


def model() -> T.PreTrainedModel:
    return T.LlavaOnevisionForConditionalGeneration(
        T.LlavaOnevisionConfig(
            vision_config=T.SiglipVisionConfig(**SIGLIP),
            text_config=T.Qwen2Config(**GQA, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"]),
            image_grid_pinpoints=PINPOINTS,
            image_token_index=259,
            video_token_index=260,
            tie_word_embeddings=True,
        )
    )


def processor() -> T.ProcessorMixin:
    size = {"height": SIZE, "width": SIZE}
    return T.LlavaOnevisionProcessor(
        image_processor=T.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=PINPOINTS),
        tokenizer=tokenizer("<image>", "<video>", image_token="<image>", video_token="<video>"),
        video_processor=T.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=chat_template("<image>", "<video>"),
    )
