"""Tiny EXAONE 4.5: window attention and grouped queries in the tower, a decoder block with a window and a full one."""

from __future__ import annotations

import torch
import transformers as T

from tests.kit.tiny import _mtp
from tests.kit.tiny._text import GQA, TOWER, tokenizer
from tests.kit.tiny.qwen2_5_vl import SPECIALS, TOKEN_IDS
from tests.kit.tiny.qwen2_5_vl import processor as qwen


def model() -> T.PreTrainedModel:
    model = T.Exaone4_5_ForConditionalGeneration(
        T.Exaone4_5_Config(
            text_config=T.Exaone4Config(
                **GQA,
                head_dim=32,
                sliding_window=64,
                sliding_window_pattern=2,
                layer_types=["sliding_attention", "full_attention"],
                tie_word_embeddings=False,
            ),
            vision_config={
                **TOWER,
                "num_key_value_heads": 2,
                "fullatt_block_indexes": [1],
                "patch_size": 14,
                "window_size": 56,
            },
            tie_word_embeddings=False,
            num_nextn_predict_layers=1,  # of the head that drafts tokens
            **TOKEN_IDS,
        )
    )
    for name, weight in model.named_parameters():
        if ".post_" in name:  # with 1 a branch would drown what it is added to
            torch.nn.init.constant_(weight, 0.25)
    return model


def extra(model: T.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Make the tensors of the head that drafts tokens, which is of the same kind as Qwen3.5's."""
    return _mtp.head(model, 1)


def processor() -> T.ProcessorMixin:
    of = qwen()
    return T.Exaone4_5_Processor(
        image_processor=of.image_processor,
        tokenizer=tokenizer(*SPECIALS),
        video_processor=of.video_processor,
        chat_template=of.chat_template,
    )
