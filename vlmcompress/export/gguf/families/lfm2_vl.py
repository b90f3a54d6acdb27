"""LFM2-VL: llama.cpp's `lfm2` with its projector of that name; short convolutions between blocks of attention."""

from __future__ import annotations

from typing import Any

from vlmcompress.export.gguf.families._parts import (
    CLIP_BLOCK,
    CLIP_KEYS,
    LANGUAGE,
    activation,
    blocks,
    both,
    rope_problems,
    text_keys,
    vision_keys,
)
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule, always, at

TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}


def key_value_heads(facts: ModelFacts) -> list[int]:
    """Heads of keys and values of each block; a convolution has none."""
    text = facts.config["text_config"]
    return [text["num_key_value_heads"] if kind == "full_attention" else 0 for kind in text["layer_types"]]


def width(facts: ModelFacts) -> int:
    """Intermediate size of an MLP, reduced as in the model if the configuration says so."""
    text = facts.config["text_config"]
    size = text["intermediate_size"]
    if text.get("block_auto_adjust_ff_dim"):
        size = int(text.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        multiple = text["block_multiple_of"]
        size = -(-size // multiple) * multiple
    return size


def patches(weight: Any, facts: ModelFacts) -> Any:
    """The matrix of patches `[out, height * width * colours]` as a convolution `[out, colours, height, width]`."""
    side = facts.config["vision_config"]["patch_size"]
    return weight.reshape(weight.shape[0], side, side, -1).permute(0, 3, 1, 2)


def taps(weight: Any, facts: ModelFacts) -> Any:
    """The weights of a depthwise convolution as `[channels, taps]`."""
    return weight[:, 0]


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    problems = rope_problems(facts)
    if facts.config["text_config"].get("conv_bias"):
        problems.append("llama.cpp's short convolutions have no biases")
    return problems


KEYS = text_keys(
    feed_forward_length=width,
    attention__head_count_kv=key_value_heads,
    attention__layer_norm_rms_epsilon=at("text_config.norm_eps", float),
    shortconv__l_cache=at("text_config.conv_L_cache"),
)
TOWER_KEYS = CLIP_KEYS | {"image_size": always(256)}  # unused: positions are interpolated to the image

FAMILY = GgufFamily(
    arch=always("lfm2"),
    language=GgufFile(
        KEYS,
        (
            TensorRule(f"{LANGUAGE}.embed_tokens.weight", "token_embd.weight"),
            *(
                TensorRule(f"{LANGUAGE}.layers.{{}}.{old}.weight", f"blk.{{}}.{new}.weight")
                for old, new in BLOCK.items()
            ),
            TensorRule(f"{LANGUAGE}.layers.{{}}.conv.conv.weight", "blk.{}.shortconv.conv.weight", change=taps),
            TensorRule(f"{LANGUAGE}.embedding_norm.weight", "token_embd_norm.weight"),
            TensorRule("lm_head.weight", "output.weight"),
        ),
    ),
    vision=GgufFile(
        vision_keys("lfm2", projector__scale_factor=at("downsample_factor"), **TOWER_KEYS) | activation(),
        (
            TensorRule(
                f"{TOWER}.embeddings.patch_embedding.weight",
                "v.patch_embd.weight",
                change=patches,
            ),
            TensorRule(f"{TOWER}.embeddings.patch_embedding.bias", "v.patch_embd.bias"),
            TensorRule(f"{TOWER}.embeddings.position_embedding.weight", "v.position_embd.weight"),
            *blocks(f"{TOWER}.encoder.layers.{{}}", CLIP_BLOCK),
            *both(f"{TOWER}.post_layernorm", "v.post_ln"),
            *both(f"{PROJECTOR}.layer_norm", "mm.input_norm"),
            *both(f"{PROJECTOR}.linear_1", "mm.1"),
            *both(f"{PROJECTOR}.linear_2", "mm.2"),
        ),
    ),
    image="<image>",
    limits=lambda facts: (facts.image["min_image_tokens"], facts.image["max_image_tokens"]),
    problems=problems,
)
