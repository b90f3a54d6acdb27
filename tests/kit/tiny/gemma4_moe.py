"""Tiny Gemma 4 with four experts next to the MLP of each block, two of which a token takes."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T

from tests.kit.tiny import gemma4
from tests.kit.tiny.gemma4 import processor as processor

MIXTURE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128}


def model(**text: Any) -> T.PreTrainedModel:
    model = gemma4.model(**MIXTURE, **text)
    for name, weight in model.named_parameters():
        if name.endswith("per_expert_scale"):
            weight.data.copy_(torch.linspace(0.5, 1.5, 4))
        if name.endswith(
            "post_feedforward_layernorm_2.weight"
        ):  # a token that quantizing sends elsewhere stays much the same
            torch.nn.init.constant_(weight, 0.025)
        if name.endswith("router.scale"):  # with 1 all experts would count nearly alike
            torch.nn.init.constant_(weight, 128.0)
    return model
