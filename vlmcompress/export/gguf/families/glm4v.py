"""GLM-4.1V and GLM-4.6V-Flash: llama.cpp's `glm4` with its projector `glm4v`.

ggml rotates channels of queries and keys half the rotated part apart, transformers neighbours. Gate and up are one matrix in
both.
"""

from __future__ import annotations

from vlmcompress.export.gguf.families._parts import (
    LANGUAGE,
    activation,
    both,
    decoder,
    head_size,
    pixel_limits,
    rope_problems,
    text_keys,
    vision_keys,
)
from vlmcompress.export.gguf.families._qwen import TOWER, TOWER_SIZES, frame, sections
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, Order, TensorRule, always, at

NORMS = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
LINEARS = {"attn.proj": "attn_out", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
TOWER_NORMS = {"norm1": "ln1", "norm2": "ln2", "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"}
MERGER = {"gate_proj": "mm.gate", "up_proj": "mm.up", "down_proj": "mm.down", "proj": "mm.model.fc"}


def rotated(facts: ModelFacts) -> int:
    """Channels of a head that are rotated."""
    rope = facts.config["text_config"]["rope_parameters"]
    return int(head_size(facts) * rope.get("partial_rotary_factor", 1.0))


def halves(heads: str) -> Order:
    """The order of rows in which channels that are rotated together stand half the rotated part apart; `heads`: path of their
    number."""

    def order(facts: ModelFacts) -> list[int]:
        size, turning = head_size(facts), rotated(facts)
        channels = [*range(0, turning, 2), *range(1, turning, 2), *range(turning, size)]
        return [head * size + channel for head in range(at(heads)(facts)) for channel in channels]

    return order


FAMILY = GgufFamily(
    arch=always("glm4"),
    language=GgufFile(
        text_keys(rope__dimension_sections=sections, rope__dimension_count=rotated),
        (
            *decoder(order=halves, biases=True, norms=NORMS),
            TensorRule(f"{LANGUAGE}.layers.{{}}.mlp.gate_up_proj.weight", "blk.{}.ffn_up.weight"),
        ),
    ),
    vision=GgufFile(
        vision_keys(
            "glm4v",
            image_size=at("vision_config.image_size"),
            embedding_length=at("vision_config.hidden_size"),
            feed_forward_length=at("vision_config.intermediate_size"),
            **(TOWER_SIZES | {"attention__layer_norm_epsilon": at("vision_config.rms_norm_eps", float)}),
        )
        | activation(),
        (
            TensorRule(f"{TOWER}.patch_embed.proj.weight", "v.patch_embd.weight", change=frame(0)),
            TensorRule(f"{TOWER}.patch_embed.proj.weight", "v.patch_embd.weight.1", change=frame(1)),
            TensorRule(f"{TOWER}.patch_embed.proj.bias", "v.patch_embd.bias"),
            TensorRule(f"{TOWER}.post_conv_layernorm.weight", "v.norm_embd.weight"),
            TensorRule(f"{TOWER}.embeddings.position_embedding.weight", "v.position_embd.weight"),
            *both(f"{TOWER}.blocks.{{}}.attn.qkv", "v.blk.{}.attn_qkv"),
            *(rule for old, new in LINEARS.items() for rule in both(f"{TOWER}.blocks.{{}}.{old}", f"v.blk.{{}}.{new}")),
            *(
                TensorRule(f"{TOWER}.blocks.{{}}.{old}.weight", f"v.blk.{{}}.{new}.weight")
                for old, new in TOWER_NORMS.items()
            ),
            TensorRule(f"{TOWER}.post_layernorm.weight", "v.post_ln.weight"),
            *both(f"{TOWER}.downsample", "mm.patch_merger"),
            *(TensorRule(f"{TOWER}.merger.{old}.weight", f"{new}.weight") for old, new in MERGER.items()),
            *both(f"{TOWER}.merger.post_projection_norm", "mm.post_norm"),
        ),
    ),
    image="<|begin_of_image|><|image|><|end_of_image|>",
    limits=lambda facts: pixel_limits(facts, facts.image["temporal_patch_size"]),  # which count both frames
    problems=rope_problems,
)
