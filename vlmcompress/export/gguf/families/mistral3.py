"""Mistral Small 3 and Ministral 3: llama.cpp's `mistral3` with its `pixtral` projector, patches merged 2x2.

The embedding of the token that ends a row of patches is stored with the tower; llama.cpp inserts it between rows.
"""

from __future__ import annotations

from vlmcompress.export.gguf.families._parts import (
    SIZES,
    activation,
    decoder,
    head_size,
    rotated_heads,
    text_keys,
    vision_keys,
)
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule, Value, always, at

TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
BREAK = "[IMG_BREAK]"
ROPE = "text_config.rope_parameters"
LINEARS = {
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_out",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
}


def yarn(name: str, default: float | None = None) -> Value:
    """A float of YaRN's settings; None without YaRN."""

    def read(facts: ModelFacts) -> float | None:
        rope = facts.config["text_config"]["rope_parameters"]
        value = rope.get(name, default)
        return float(value) if rope["rope_type"] == "yarn" and value is not None else None

    return read


def vision_heads(facts: ModelFacts) -> int:
    """Channels of a head of the tower."""
    vision = facts.config["vision_config"]
    return vision.get("head_dim") or vision["hidden_size"] // vision["num_attention_heads"]


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    problems, config = [], facts.config
    rope = config["text_config"]["rope_parameters"]
    if config["text_config"]["model_type"] not in ("mistral", "ministral3"):
        problems.append(f"a decoder of the kind '{config['text_config']['model_type']}' is not written for Mistral 3")
    if rope["rope_type"] not in ("default", "yarn"):
        problems.append(f"rotary positions of the kind '{rope['rope_type']}' are not written to GGUF")
    if rope.get("mscale", 1) != rope.get("mscale_all_dim", 1):
        problems.append("llama.cpp's YaRN for Mistral 3 has one mscale for all; this model has two")
    if config["projector_hidden_act"] != "gelu" or config["vision_feature_layer"] != -1:
        problems.append("llama.cpp runs Pixtral with all its blocks and a GELU projector")
    if config["vision_config"]["rope_parameters"]["rope_theta"] != 10000:
        problems.append("llama.cpp's Pixtral tower has positions with the base 10000")
    if facts.tokens and BREAK not in facts.tokens:
        problems.append(f"the tokenizer has no token {BREAK}, which llama.cpp inserts between rows of an image")
    return problems


FAMILY = GgufFamily(
    arch=always("mistral3"),
    language=GgufFile(
        text_keys(
            rope__dimension_count=head_size,
            rope__scaling__type=lambda facts: "yarn" if yarn("factor")(facts) else None,
            rope__scaling__factor=yarn("factor"),
            rope__scaling__yarn_beta_fast=yarn("beta_fast", 32),
            rope__scaling__yarn_beta_slow=yarn("beta_slow", 1),
            rope__scaling__yarn_log_multiplier=yarn("mscale_all_dim"),
            rope__scaling__original_context_length=at(f"{ROPE}.original_max_position_embeddings"),
            attention__temperature_scale=at(f"{ROPE}.llama_4_scaling_beta", float),
        ),
        decoder(order=rotated_heads),
    ),
    vision=GgufFile(
        vision_keys(
            "pixtral",
            image_size=at("vision_config.image_size"),
            **SIZES,
            attention__layer_norm_epsilon=always(1e-5),
            spatial_merge_size=at("spatial_merge_size"),
        )
        | activation(),
        (
            TensorRule(f"{TOWER}.patch_conv.weight", "v.patch_embd.weight"),
            TensorRule(f"{TOWER}.ln_pre.weight", "v.pre_ln.weight"),
            *(
                TensorRule(
                    f"{TOWER}.transformer.layers.{{}}.attention.{kind}_proj.weight",
                    f"v.blk.{{}}.attn_{kind}.weight",
                    rows=rotated_heads("vision_config.num_attention_heads", vision_heads),
                )
                for kind in "qk"
            ),
            *(
                TensorRule(f"{TOWER}.transformer.layers.{{}}.{old}.weight", f"v.blk.{{}}.{new}.weight")
                for old, new in LINEARS.items()
            ),
            TensorRule(f"{PROJECTOR}.norm.weight", "mm.input_norm.weight"),
            TensorRule(f"{PROJECTOR}.patch_merger.merging_layer.weight", "mm.patch_merger.weight"),
            TensorRule(f"{PROJECTOR}.linear_1.weight", "mm.1.weight"),
            TensorRule(f"{PROJECTOR}.linear_2.weight", "mm.2.weight"),
            TensorRule(
                "model.language_model.embed_tokens.weight",
                "v.token_embd.img_break",
                change=lambda embedding, facts: embedding[facts.tokens[BREAK]],
            ),
        ),
    ),
    image="[IMG]",
    problems=problems,
)
