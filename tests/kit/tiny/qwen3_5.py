"""Tiny Qwen3.5: a Gated DeltaNet block and one of attention with an output gate, no deepstack, tied head, MTP head.

Heads of the Gated DeltaNet are 128 wide, as in all published models: vLLM's CPU kernel refuses 32.
"""

from __future__ import annotations

import torch
import transformers as T

from tests.kit.tiny import _mtp
from tests.kit.tiny._text import GQA, TOWER
from tests.kit.tiny.qwen2_5_vl import TOKEN_IDS
from tests.kit.tiny.qwen3_vl import processor as processor

ROPE = {
    "rope_type": "default",
    "mrope_section": [3, 3, 2],
    "rope_theta": 10000.0,
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.5,
}
LINEAR = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
VISION = {
    **TOWER,
    "num_position_embeddings": 256,
}


def model(**changes: int) -> T.PreTrainedModel:
    text = {**GQA, **LINEAR, **changes, **_mtp.CONFIG}
    text |= {"head_dim": 32, "rope_parameters": ROPE, "tie_word_embeddings": True}
    return T.Qwen3_5ForConditionalGeneration(
        T.Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True, **TOKEN_IDS)
    )


def extra(model: T.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Make the MTP head's tensors."""
    return _mtp.head(model, LINEAR["layer_types"].index("full_attention"))
