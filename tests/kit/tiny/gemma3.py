"""Tiny Gemma 3: one sliding-window and one full-attention block, 16 patches pooled into 4 visual tokens, tied head."""

from __future__ import annotations

import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer
from tests.kit.tiny.llava_onevision import RENAME, SIGLIP, SIZE

__all__ = ["RENAME", "model", "processor"]


def model() -> T.PreTrainedModel:
    return T.Gemma3ForConditionalGeneration(
        T.Gemma3Config(
            vision_config=T.SiglipVisionConfig(**SIGLIP | {"num_hidden_layers": 2}),
            text_config=T.Gemma3TextConfig(
                **GQA,
                head_dim=32,
                query_pre_attn_scalar=32,
                sliding_window=64,
                layer_types=["sliding_attention", "full_attention"],
            ),
            mm_tokens_per_image=4,
            image_token_index=259,
            boi_token_index=260,
            eoi_token_index=261,
        )
    )


def processor() -> T.ProcessorMixin:
    tok = tokenizer(
        "<image_soft_token>",
        "<start_of_image>",
        "<end_of_image>",
        image_token="<image_soft_token>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
    )
    tok.add_tokens(["\n" * count for count in (1, 2, 3, 4)])  # Gemma's vocabulary has these and vLLM asks for them
    return T.Gemma3Processor(
        image_processor=T.Gemma3ImageProcessor(size={"height": SIZE, "width": SIZE}),
        tokenizer=tok,
        image_seq_length=4,
        chat_template=chat_template("<start_of_image>"),
    )
