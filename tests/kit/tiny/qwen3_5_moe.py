"""Tiny Qwen3.5 with a mixture of four experts and a shared one in each block. As published, experts are
fused; transformers saves them one by one."""

from __future__ import annotations

import torch
import transformers as T
from torch import Tensor

from tests.kit.tiny import _mtp
from tests.kit.tiny._text import GQA
from tests.kit.tiny.qwen2_5_vl import TOKEN_IDS
from tests.kit.tiny.qwen3_5 import LINEAR, ROPE, VISION
from tests.kit.tiny.qwen3_vl import processor as processor

MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}


def model(**mixture: int) -> T.PreTrainedModel:
    text = {**GQA, **LINEAR, **MIXTURE, **mixture, **_mtp.CONFIG}
    text |= {"head_dim": 32, "rope_parameters": ROPE, "tie_word_embeddings": True}
    return T.Qwen3_5MoeForConditionalGeneration(
        T.Qwen3_5MoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=True, **TOKEN_IDS)
    )


def extra(model: T.PreTrainedModel) -> dict[str, Tensor]:
    """Make the MTP head's tensors; it has experts of its own, fused."""
    return _mtp.head(model, LINEAR["layer_types"].index("full_attention"))


def hub(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {name: value for name, value in tensors.items() if ".experts." not in name or name.startswith("mtp.")}
    for name in [name for name in tensors if name.endswith(".experts.0.down_proj.weight")]:
        parent, count = name.removesuffix(".0.down_proj.weight"), MIXTURE["num_experts"]
        gate, up, down = (
            torch.stack([tensors[f"{parent}.{index}.{part}.weight"] for index in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        kept |= {f"{parent}.gate_up_proj": torch.cat([gate, up], 1), f"{parent}.down_proj": down}
    return kept
