"""Common parts of Qwen2-VL and Qwen2.5-VL: a Qwen2 decoder with positions in time, rows and columns, a two-frame tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vlmcompress.export.gguf.families._parts import both, decoder, square_pixels, text_keys
from vlmcompress.export.gguf.spec import GgufFile, ModelFacts, TensorRule, Value, always, at

TOWER = "model.visual"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def sections(facts: ModelFacts) -> list[int]:
    """Numbers of channel pairs that are rotated by the position in time, row and column; ggml has a fourth kind."""
    return [*facts.config["text_config"]["rope_parameters"]["mrope_section"], 0]


def frame(number: int) -> Callable[[Any, ModelFacts], Any]:
    """A function that selects one of the two frames of a convolution `[out, colours, frames, height, width]`."""
    return lambda weight, facts: weight[:, :, number]


LANGUAGE = GgufFile(text_keys(rope__dimension_sections=sections), decoder(biases=True))
TOWER_SIZES: dict[str, Value] = {
    "block_count": at("vision_config.depth"),
    "attention__head_count": at("vision_config.num_heads"),
    "attention__layer_norm_epsilon": always(1e-6),
    "spatial_merge_size": at("vision_config.spatial_merge_size"),
    "image_min_pixels": square_pixels("shortest_edge"),
    "image_max_pixels": square_pixels("longest_edge"),
}


def tower(block: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    """The rules of a tower; `block`: those of a block besides attention."""
    qkv = f"{TOWER}.blocks.{{}}.attn.qkv"
    parts = [rule for i, name in enumerate("qkv") for rule in both(qkv, f"v.blk.{{}}.attn_{name}", part=(i, 3))]
    return (
        TensorRule(f"{TOWER}.patch_embed.proj.weight", "v.patch_embd.weight", change=frame(0)),
        TensorRule(f"{TOWER}.patch_embed.proj.weight", "v.patch_embd.weight.1", change=frame(1)),
        *parts,
        *both(f"{TOWER}.blocks.{{}}.attn.proj", "v.blk.{}.attn_out"),
        *block,
        *both(f"{TOWER}.merger.mlp.0", "mm.0"),
        *both(f"{TOWER}.merger.mlp.2", "mm.2"),
    )
