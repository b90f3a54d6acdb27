"""Tiny LLaVA-1.5: CLIP on 56x56 images in 14x14 patches = 16 visual tokens, Llama decoder."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import TEXT, chat_template, tokenizer

SIZE = 56
CLIP = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 14,
    "projection_dim": 128,
}
# transformers 5 saves the tower without `vision_model`, hub checkpoints have it and vLLM asks for it.
RENAME = {"vision_tower.": "vision_tower.vision_model."}


def model() -> T.PreTrainedModel:
    return T.LlavaForConditionalGeneration(
        T.LlavaConfig(
            vision_config=T.CLIPVisionConfig(**CLIP),
            text_config=T.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"]),
            image_token_index=259,
            image_seq_length=16,
        )
    )


def processor() -> T.ProcessorMixin:
    return T.LlavaProcessor(
        image_processor=T.CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}),
        tokenizer=tokenizer("<image>", image_token="<image>"),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=chat_template("<image>"),
    )
