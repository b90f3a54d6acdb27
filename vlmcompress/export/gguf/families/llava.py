"""LLaVA-1.5: llama.cpp's `llama` with its `mlp` projector."""

from __future__ import annotations

from vlmcompress.export.gguf.families._parts import (
    CLIP_BLOCK,
    CLIP_KEYS,
    activation,
    blocks,
    both,
    decoder,
    first_last,
    head_size,
    rope_problems,
    rotated_heads,
    text_keys,
    vision_keys,
)
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule, always

TOWER = "model.vision_tower"


def feature_layer(facts: ModelFacts) -> list[int]:
    """The number of blocks that run before the features are taken."""
    layer = facts.config["vision_feature_layer"]
    return [layer if layer >= 0 else facts.config["vision_config"]["num_hidden_layers"] + 1 + layer]


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    config = facts.config
    problems = rope_problems(facts)
    if config["text_config"]["model_type"] not in ("llama", "mistral"):
        problems.append(f"a decoder of the kind '{config['text_config']['model_type']}' is not written for LLaVA")
    if config["vision_config"]["model_type"] != "clip_vision_model" or not isinstance(
        config["vision_feature_layer"], int
    ):
        problems.append("llama.cpp runs LLaVA with a CLIP tower and the features of one layer")
    if config["vision_feature_select_strategy"] != "default" or config["projector_hidden_act"] != "gelu":
        problems.append("llama.cpp drops the CLS token and has a GELU projector")
    return problems


FAMILY = GgufFamily(
    arch=always("llama"),
    language=GgufFile(text_keys(rope__dimension_count=head_size), decoder(order=rotated_heads)),
    vision=GgufFile(
        vision_keys("mlp", feature_layer=feature_layer, **CLIP_KEYS) | activation(),
        (
            TensorRule(f"{TOWER}.embeddings.class_embedding", "v.class_embd"),
            TensorRule(f"{TOWER}.embeddings.patch_embedding.weight", "v.patch_embd.weight"),
            TensorRule(f"{TOWER}.embeddings.position_embedding.weight", "v.position_embd.weight", change=first_last),
            *both(f"{TOWER}.pre_layrnorm", "v.pre_ln"),
            *blocks(f"{TOWER}.encoder.layers.{{}}", CLIP_BLOCK),
            *both("model.multi_modal_projector.linear_1", "mm.0"),
            *both("model.multi_modal_projector.linear_2", "mm.2"),
        ),
    ),
    unused=(f"{TOWER}.post_layernorm",),
    image="<image>",
    problems=problems,
)
