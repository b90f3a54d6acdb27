"""Tiny InternVL: 56x56 tiles in 14x14 patches, shuffled 2x2 into 4 visual tokens a tile."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer

SIZE = 56


def model() -> T.PreTrainedModel:
    return T.InternVLForConditionalGeneration(
        T.InternVLConfig(
            vision_config=T.InternVLVisionConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                attention_bias=True,
                image_size=[SIZE, SIZE],
                patch_size=[14, 14],
            ),
            text_config=T.Qwen2Config(**GQA, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"]),
            image_token_id=259,
            image_seq_length=4,
            tie_word_embeddings=False,
        )
    )


def processor() -> T.ProcessorMixin:
    size = {"height": SIZE, "width": SIZE}
    return T.InternVLProcessor(
        image_processor=T.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer=tokenizer(
            "<IMG_CONTEXT>",
            "<img>",
            "</img>",
            "<video>",
            context_image_token="<IMG_CONTEXT>",
            start_image_token="<img>",
            end_image_token="</img>",
            video_token="<video>",
        ),
        video_processor=T.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=chat_template("<IMG_CONTEXT>\n", "<video>\n"),
    )
