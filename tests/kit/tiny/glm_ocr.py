"""Tiny GLM-OCR: patches of 14x14 merged 2x2, norms on the tower's queries and keys.

With `num_nextn_predict_layers` 1 it has a draft head; `num_hidden_layers` is 16 then, as transformers drops block 16 alone.
"""

from __future__ import annotations

import torch
import transformers as T

from tests.kit.tiny._text import GQA
from tests.kit.tiny.glm4v import ROPE, TOKEN_IDS, VISION
from tests.kit.tiny.glm4v import processor as processor


def model(**text: int) -> T.PreTrainedModel:
    return T.GlmOcrForConditionalGeneration(
        T.GlmOcrConfig(
            text_config={
                **GQA,
                "intermediate_size": 384,  # vLLM reads it as the merger's width
                "rope_parameters": ROPE,
                **text,
            },
            vision_config=VISION,
            tie_word_embeddings=False,
            **TOKEN_IDS,
        )
    )


def extra(model: T.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Make the tensors of the head that drafts tokens: a block after the last, with its own embedding and output head."""
    config = model.config.get_text_config()
    if not getattr(config, "num_nextn_predict_layers", 0):
        return {}
    last, hidden = model.model.language_model.layers[-1], config.hidden_size
    tensors = {name: torch.randn_like(value) / 10 for name, value in last.state_dict().items()}
    for name, shape in {
        "eh_proj": (hidden, 2 * hidden),
        "embed_tokens": (config.vocab_size, hidden),
        "shared_head.head": (config.vocab_size, hidden),
        **dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,)),
    }.items():
        tensors[f"{name}.weight"] = torch.randn(shape, dtype=model.dtype) / 10
    return {f"model.language_model.layers.{config.num_hidden_layers}.{name}": value for name, value in tensors.items()}
