"""Tiny Gemma 4: a block with a window, a full one whose keys are its values, and one that shares these.

All kinds of blocks that published models have are in this one, and the tower's layers clip, as those of small models
do. An image has at most 70 visual tokens, the least that the processor allows.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as T

from tests.kit.tiny._text import GQA, chat_template, tokenizer

NAMED = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
PATCHES = {"patch_size": 4, "pooling_kernel_size": 3}


def model(**text: Any) -> T.PreTrainedModel:
    """The model; `text`: values of the decoder's configuration."""
    values: dict[str, Any] = {
        # of images transformers looks up the row of `pad_token_id` per layer, other engines row 0
        **{**GQA, "num_hidden_layers": 3, "pad_token_id": 0},
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 128,
        "vocab_size_per_layer_input": 384,
    }
    model = T.Gemma4ForConditionalGeneration(
        T.Gemma4Config(
            vision_config=T.Gemma4VisionConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=32,
                position_embedding_size=256,
                use_clipped_linears=True,
                default_output_length=70,  # transformers ignores it, vLLM reads it
                **PATCHES,
            ),
            text_config=T.Gemma4TextConfig(**(values | text)),
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
        if name.endswith("q_norm.weight"):  # attention has no other scale: with 1 it would see one token each
            torch.nn.init.constant_(weight, 32**-0.5)
        if ".post_" in name:  # with 1 a branch would drown what it is added to
            torch.nn.init.constant_(weight, 0.25)
    for name, bound in model.model.vision_tower.named_buffers():
        if name.endswith(("_min", "_max")):
            torch.nn.init.constant_(bound, -1.0 if name.endswith("_min") else 1.0)
    return model


def processor() -> T.ProcessorMixin:
    return T.Gemma4Processor(
        feature_extractor=T.Gemma4AudioFeatureExtractor(),
        image_processor=T.Gemma4ImageProcessor(max_soft_tokens=70, **PATCHES),
        tokenizer=tokenizer(*NAMED.values(), "<|video|>", **NAMED),
        video_processor=T.Gemma4VideoProcessor(max_soft_tokens=70, **PATCHES),
        image_seq_length=70,
        chat_template=chat_template("<|image|>", "<|video|>"),
    )
