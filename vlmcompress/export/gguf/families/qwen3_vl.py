"""Qwen3-VL: llama.cpp's `qwen3vl` with its `qwen3vl_merger`."""

from __future__ import annotations

import math

from vlmcompress.export.gguf.families._parts import (
    HEAD_NORMS,
    NORMS,
    activation,
    blocks,
    both,
    decoder,
    pixel_limits,
    rope_problems,
    text_keys,
    vision_keys,
)
from vlmcompress.export.gguf.families._qwen import IMAGE, TOWER, TOWER_SIZES, frame, sections
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule, always, at

BLOCK = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
MERGER = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}


def image_size(facts: ModelFacts) -> int:
    """Side, in pixels, of the square image that the tower's positions were learned for."""
    vision = facts.config["vision_config"]
    return math.isqrt(vision["num_position_embeddings"]) * vision["patch_size"]


def deep(facts: ModelFacts) -> list[int]:
    """The tower's blocks whose outputs go into the decoder's first ones."""
    return list(facts.config["vision_config"].get("deepstack_visual_indexes") or ())


TOWER_KEYS = vision_keys(
    "qwen3vl_merger",
    image_size=image_size,
    embedding_length=at("vision_config.hidden_size"),
    feed_forward_length=at("vision_config.intermediate_size"),
    is_deepstack_layers=lambda facts: [n in deep(facts) for n in range(facts.config["vision_config"]["depth"])],
    **TOWER_SIZES,
)
TOWER_RULES = (
    TensorRule(f"{TOWER}.patch_embed.proj.weight", "v.patch_embd.weight", change=frame(0)),
    TensorRule(f"{TOWER}.patch_embed.proj.weight", "v.patch_embd.weight.1", change=frame(1)),
    TensorRule(f"{TOWER}.patch_embed.proj.bias", "v.patch_embd.bias"),
    TensorRule(f"{TOWER}.pos_embed.weight", "v.position_embd.weight"),
    *blocks(f"{TOWER}.blocks.{{}}", BLOCK),
    *both(f"{TOWER}.merger.norm", "v.post_ln"),
    *both(f"{TOWER}.merger.linear_fc1", "mm.0"),
    *both(f"{TOWER}.merger.linear_fc2", "mm.2"),
    *(
        rule
        for old, new in MERGER.items()
        for rule in both(
            f"{TOWER}.deepstack_merger_list.{{}}.{old}",
            f"v.deepstack.{{}}.{new}",
            number=lambda facts, number: deep(facts)[number],
        )
    ),
)
VISION = GgufFile(TOWER_KEYS | activation(), TOWER_RULES)

FAMILY = GgufFamily(
    arch=always("qwen3vl"),
    language=GgufFile(
        text_keys(rope__dimension_sections=sections, n_deepstack_layers=lambda facts: len(deep(facts))),
        decoder(norms=NORMS | HEAD_NORMS),
    ),
    vision=VISION,
    image=IMAGE,
    limits=pixel_limits,
    problems=rope_problems,
)
