"""Tiny Mistral 3 with the decoder of Ministral 3: Pixtral on patches of 14x14, merged 2x2, at most 112 pixels a side."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer

ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 32,
}


def model() -> T.PreTrainedModel:
    return T.Mistral3ForConditionalGeneration(
        T.Mistral3Config(
            vision_config=T.PixtralVisionConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                head_dim=32,
                image_size=112,
                patch_size=14,
            ),
            text_config=T.Ministral3Config(**GQA, head_dim=32, rope_parameters=ROPE, tie_word_embeddings=False),
            image_token_index=259,
            tie_word_embeddings=False,
        )
    )


def processor() -> T.ProcessorMixin:
    return T.PixtralProcessor(
        image_processor=T.PixtralImageProcessor(size={"longest_edge": 112}, patch_size=14),
        tokenizer=tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        patch_size=14,
        spatial_merge_size=2,
        chat_template=chat_template("[IMG]"),
    )
