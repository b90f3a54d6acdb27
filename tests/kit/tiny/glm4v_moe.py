"""Tiny GLM-4.6V: a dense block and one with a mixture of four experts, two of which a token takes, and one for all tokens."""

from __future__ import annotations

import torch
import transformers as T

from tests.kit.tiny._text import GQA
from tests.kit.tiny.glm4v import ROPE, TOKEN_IDS, VISION
from tests.kit.tiny.glm4v import processor as processor


def model() -> T.PreTrainedModel:
    model = T.Glm4vMoeForConditionalGeneration(
        T.Glm4vMoeConfig(
            text_config={
                **GQA,
                "rope_parameters": ROPE,
                "head_dim": 32,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 128,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 1.5,
                "n_group": 1,
                "topk_group": 1,
                "use_qk_norm": False,
            },
            vision_config=VISION,
            tie_word_embeddings=False,
            **TOKEN_IDS,
        )
    )
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # so that a router without it would choose others
            buffer.copy_(torch.linspace(-0.05, 0.05, 4))
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):  # else images, whose tokens are much alike, would all go to two experts
            torch.nn.init.normal_(weight, std=0.3)
    return model
