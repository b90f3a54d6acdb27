"""Qwen2-VL: llama.cpp's `qwen2vl` with its `qwen2vl_merger`."""

from __future__ import annotations

from vlmcompress.export.gguf.families._parts import activation, both, pixel_limits, rope_problems, vision_keys
from vlmcompress.export.gguf.families._qwen import IMAGE, LANGUAGE, TOWER, TOWER_SIZES, tower
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, always, at


def hidden(facts: ModelFacts) -> int:
    """Channels between the two layers of a tower block's MLP."""
    return int(facts.config["vision_config"]["embed_dim"] * facts.config["vision_config"]["mlp_ratio"])


BLOCK = (
    *both(f"{TOWER}.blocks.{{}}.norm1", "v.blk.{}.ln1"),
    *both(f"{TOWER}.blocks.{{}}.norm2", "v.blk.{}.ln2"),
    *both(f"{TOWER}.blocks.{{}}.mlp.fc1", "v.blk.{}.ffn_up"),
    *both(f"{TOWER}.blocks.{{}}.mlp.fc2", "v.blk.{}.ffn_down"),
    *both(f"{TOWER}.merger.ln_q", "v.post_ln"),
)
KEYS = vision_keys(
    "qwen2vl_merger",
    image_size=always(560),  # unused: images keep their sizes
    embedding_length=at("vision_config.embed_dim"),
    feed_forward_length=hidden,
    **TOWER_SIZES,
)

FAMILY = GgufFamily(
    arch=always("qwen2vl"),
    language=LANGUAGE,
    vision=GgufFile(KEYS | activation(), tower(BLOCK)),
    image=IMAGE,
    limits=pixel_limits,
    problems=rope_problems,
)
