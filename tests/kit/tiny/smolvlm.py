"""Tiny SmolVLM: the tiny Idefics3 with a tied head and SmolVLM's own processor, which needs the package `num2words`."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer
from tests.kit.tiny.idefics3 import SIZE, SPECIALS


def model() -> T.PreTrainedModel:
    return T.SmolVLMForConditionalGeneration(
        T.SmolVLMConfig(
            vision_config=T.SmolVLMVisionConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=SIZE,
                patch_size=14,
            ).to_dict(),
            text_config=T.LlamaConfig(**GQA, tie_word_embeddings=True).to_dict(),
            image_token_id=259,
            scale_factor=2,
            pad_token_id=257,
            tie_word_embeddings=True,
        )
    )


def processor() -> T.ProcessorMixin:
    size = {"longest_edge": 2 * SIZE}
    tile = {"longest_edge": SIZE}
    sampling = {"fps": 1, "max_frames": 4, "video_size": size}
    return T.SmolVLMProcessor(
        image_processor=T.SmolVLMImageProcessor(size=size, max_image_size=tile),
        tokenizer=tokenizer(*SPECIALS),
        video_processor=T.SmolVLMVideoProcessor(size=tile, max_image_size=tile, video_sampling=sampling),
        image_seq_len=4,
        chat_template=chat_template("<image>", "<video>"),
    )
