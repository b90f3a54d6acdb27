"""Tiny Qwen3-VL with a dense block and one with a mixture of four experts, two of which a token takes.

As published, the experts of a block are fused and transposed. No fused tensor is square: transformers would take it for one
that is not transposed.
"""

from __future__ import annotations

import transformers as T
from torch import Tensor

from tests.kit.tiny._text import GQA, TOWER
from tests.kit.tiny.qwen2_5_vl import TOKEN_IDS
from tests.kit.tiny.qwen3_vl import processor as processor

MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
ROPE = {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 10000.0, "mrope_interleaved": True}
VISION = {
    **TOWER,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 256,
}


def model(**mixture: int) -> T.PreTrainedModel:
    text = {**GQA, **MIXTURE, **mixture, "head_dim": 32, "rope_parameters": ROPE, "tie_word_embeddings": True}
    return T.Qwen3VLMoeForConditionalGeneration(
        T.Qwen3VLMoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=True, **TOKEN_IDS)
    )


def hub(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.mT.contiguous() if ".experts." in name else value for name, value in tensors.items()}
