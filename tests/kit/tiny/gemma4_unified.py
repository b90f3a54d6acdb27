"""Tiny Gemma 4 without a tower: a block with a window, and a full one whose keys are its values."""

from __future__ import annotations

import torch
import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer
from tests.kit.tiny.gemma4 import NAMED, PATCHES


def model() -> T.PreTrainedModel:
    model = T.Gemma4UnifiedForConditionalGeneration(
        T.Gemma4UnifiedConfig(
            vision_config=T.Gemma4UnifiedVisionConfig(
                mm_embed_dim=128, mm_posemb_size=128, output_proj_dims=128, num_soft_tokens=70, **PATCHES
            ),
            text_config=T.Gemma4UnifiedTextConfig(
                **GQA,
                head_dim=32,
                global_head_dim=64,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                sliding_window=64,
                layer_types=["sliding_attention", "full_attention"],
            ),
            image_token_id=259,
            boi_token_id=260,
            eoi_token_id=261,
            audio_token_id=262,
            boa_token_id=263,
            eoa_token_index=264,
            video_token_id=265,
        )
    )
    for name, weight in model.named_parameters():
        if name.endswith("q_norm.weight"):  # as in the tiny Gemma 4
            torch.nn.init.constant_(weight, 32**-0.5)
        if ".post_" in name:
            torch.nn.init.constant_(weight, 0.25)
    return model


def processor() -> T.ProcessorMixin:
    return T.Gemma4UnifiedProcessor(
        feature_extractor=T.Gemma4UnifiedAudioFeatureExtractor(),
        image_processor=T.Gemma4UnifiedImageProcessor(max_soft_tokens=70, **PATCHES),
        tokenizer=tokenizer(*NAMED.values(), "<|video|>", **NAMED),
        video_processor=T.Gemma4UnifiedVideoProcessor(max_soft_tokens=70, **PATCHES),
        image_seq_length=70,
        chat_template=chat_template("<|image|>", "<|video|>"),
    )
