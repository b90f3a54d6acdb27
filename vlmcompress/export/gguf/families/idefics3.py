"""Idefics3 and SmolVLM: llama.cpp's `llama` with its `idefics3` projector; images are cut into tiles."""

from __future__ import annotations

from vlmcompress.export.gguf.families._parts import (
    CLIP_BLOCK,
    CLIP_KEYS,
    activation,
    blocks,
    both,
    decoder,
    head_size,
    rope_problems,
    rotated_heads,
    text_keys,
    vision_keys,
)
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule, always, at

TOWER = "model.vision_model"


def longest_edge(facts: ModelFacts) -> int:
    """Pixels of the longest side of an image before it is cut into tiles."""
    return (facts.image.get("size") or {}).get("longest_edge") or facts.config["vision_config"]["image_size"]


FAMILY = GgufFamily(
    arch=always("llama"),
    language=GgufFile(
        text_keys(rope__dimension_count=head_size), decoder(order=rotated_heads, root="model.text_model")
    ),
    vision=GgufFile(
        vision_keys(
            "idefics3", projector__scale_factor=at("scale_factor"), preproc_image_size=longest_edge, **CLIP_KEYS
        )
        | activation(),
        (
            *both(f"{TOWER}.embeddings.patch_embedding", "v.patch_embd"),
            TensorRule(f"{TOWER}.embeddings.position_embedding.weight", "v.position_embd.weight"),
            *blocks(f"{TOWER}.encoder.layers.{{}}", CLIP_BLOCK),
            *both(f"{TOWER}.post_layernorm", "v.post_ln"),
            TensorRule("model.connector.modality_projection.proj.weight", "mm.model.fc.weight"),
        ),
    ),
    image="<image>",
    problems=rope_problems,
)
