"""Gemma 4 with a tower, without experts: llama.cpp's `gemma4` with its projector `gemma4v`.

Norms multiply by their weights as they are. Blocks with full attention have heads of another width, and rotate a part of their
channels: llama.cpp rotates all by frequencies divided by `rope_freqs`, which are huge for the others. Blocks that reuse keys
and values, or use keys as values, lack those layers in both. An image's tokens see each other in models of other widths than
those of E2B and E4B, which llama.cpp knows by their width alone. The audio tower is left out.
"""

from __future__ import annotations

from typing import Any

from vlmcompress.export.gguf.families._parts import HEAD_NORMS, LANGUAGE, SIZES, decoder, text_keys, vision_keys
from vlmcompress.export.gguf.families.gemma3 import NORMS, sliding
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule, Value, always, at

TOWER = "model.vision_tower"
CAUSAL = (1536, 2560)
"""Widths of the decoders whose images llama.cpp decodes with causal attention (`mtmd_decode_use_non_causal`)."""
BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BLOCK_NORMS = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
}
PER_LAYER = {
    "layers.{}.per_layer_input_gate.weight": "blk.{}.inp_gate.weight",
    "layers.{}.per_layer_projection.weight": "blk.{}.proj.weight",
    "layers.{}.post_per_layer_input_norm.weight": "blk.{}.post_norm.weight",
    "layers.{}.layer_scalar": "blk.{}.layer_output_scale.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}


def of_block(facts: ModelFacts, number: int, key: str) -> Any:
    """A setting of the decoder in a block, which may differ from that of the whole."""
    text = facts.config["text_config"]
    overrides = {int(block): values for block, values in (text.get("per_layer_config") or {}).items()}
    return overrides.get(number, {}).get(key, text[key])


def of_kind(key: str, windows: bool) -> Value:
    """The setting of the first block with a window (True) or full attention (False); None: there is no such block."""

    def read(facts: ModelFacts) -> Any:
        return next((of_block(facts, n, key) for n, window in enumerate(sliding(facts)) if window == windows), None)

    return read


def key_value_heads(facts: ModelFacts) -> list[int]:
    """Heads of keys and values of each block."""
    return [of_block(facts, number, "num_key_value_heads") for number in range(len(sliding(facts)))]


def widths(facts: ModelFacts) -> list[int]:
    """Intermediate size of each block's MLP; blocks that reuse keys and values may have twice that of others."""
    text = facts.config["text_config"]
    computing = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    size, factor = text["intermediate_size"], 2 if text["use_double_wide_mlp"] else 1
    return [size if number < computing else size * factor for number in range(text["num_hidden_layers"])]


def rotated(facts: ModelFacts) -> int:
    """Channels of a head with full attention, all of which are rotated, some by nothing."""
    return of_kind("head_dim", False)(facts)


def divisors(weight: Any, facts: ModelFacts) -> Any:
    """Divisors of the frequencies of channel pairs in full attention: 1 for those that are rotated."""
    rope, pairs = facts.config["text_config"]["rope_parameters"]["full_attention"], rotated(facts) // 2
    turning = int(rope.get("partial_rotary_factor", 1.0) * pairs)
    return weight.new_tensor([1.0] * turning + [1e30] * (pairs - turning))


def patches(weight: Any, facts: ModelFacts) -> Any:
    """The matrix of patches `[out, height * width * colours]` as a convolution `[out, colours, height, width]`."""
    side = facts.config["vision_config"]["patch_size"]
    return weight.reshape(weight.shape[0], side, side, -1).permute(0, 3, 1, 2)


def scalar(value: Any, facts: ModelFacts) -> Any:
    """A number as a tensor with one dimension."""
    return value.reshape(1)


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    text, problems = facts.config["text_config"], []
    ropes, windows = text["rope_parameters"], sliding(facts)
    if ropes["full_attention"]["rope_type"] != "proportional" or ropes["sliding_attention"]["rope_type"] != "default":
        problems.append("rotary positions of this kind are not written to GGUF")
    if set(windows) != {True, False}:
        problems.append("llama.cpp's Gemma 4 has blocks with a window and with full attention; this model has one kind")
    computing = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    if text["num_kv_shared_layers"] and windows[computing - 2 : computing] != [True, False]:
        problems.append(
            f"llama.cpp reuses keys and values of blocks {computing - 2} (with a window) and {computing - 1} (full attention); "
            "this model has other kinds there"
        )
    both_ways = text["use_bidirectional_attention"]
    if both_ways not in (None, "vision") or (both_ways == "vision") == (text["hidden_size"] in CAUSAL):
        problems.append(
            f"llama.cpp lets the tokens of an image see each other in decoders of other widths than {CAUSAL[0]} and "
            f"{CAUSAL[1]}; this one is {text['hidden_size']} wide and has use_bidirectional_attention {both_ways}"
        )
    if text["hidden_size_per_layer_input"] and text["pad_token_id"]:
        problems.append(
            f"llama.cpp takes row 0 of the embedding per layer for images, this model row {text['pad_token_id']}"
        )
    return problems


def limits(facts: ModelFacts) -> tuple[int, int]:
    """Most visual tokens of an image, and as few less as llama.cpp's rounding may add to make an image that large."""
    budget = facts.image["max_soft_tokens"]
    return budget - budget // 7, budget


def language(*rules: TensorRule, **keys: Value) -> GgufFile:
    """The decoder's file; `rules`, `keys`: further ones."""
    return GgufFile(
        text_keys(
            feed_forward_length=widths,
            attention__head_count_kv=key_value_heads,
            attention__key_length=of_kind("head_dim", False),
            attention__value_length=of_kind("head_dim", False),
            attention__key_length_swa=of_kind("head_dim", True),
            attention__value_length_swa=of_kind("head_dim", True),
            attention__sliding_window=at("text_config.sliding_window"),
            attention__sliding_window_pattern=sliding,
            attention__shared_kv_layers=at("text_config.num_kv_shared_layers"),
            embedding_length_per_layer_input=lambda facts: (
                facts.config["text_config"]["hidden_size_per_layer_input"] or 0
            ),
            rope__freq_base=at("text_config.rope_parameters.full_attention.rope_theta", float),
            rope__freq_base_swa=at("text_config.rope_parameters.sliding_attention.rope_theta", float),
            rope__dimension_count=rotated,
            rope__dimension_count_swa=of_kind("head_dim", True),
            # llama.cpp's default is 30
            final_logit_softcapping=lambda facts: float(facts.config["text_config"]["final_logit_softcapping"] or 0),
            **keys,
        ),
        (
            *decoder(norms=NORMS | HEAD_NORMS),
            *(TensorRule(f"{LANGUAGE}.{old}", new) for old, new in PER_LAYER.items()),
            TensorRule(f"{LANGUAGE}.norm.weight", "rope_freqs.weight", change=divisors),
            *rules,
        ),
    )


VISION = GgufFile(
    vision_keys(
        "gemma4v",
        image_size=always(224),  # unused: images keep their shapes
        **SIZES,
        attention__layer_norm_epsilon=at("vision_config.rms_norm_eps", float),
        projector__scale_factor=at("vision_config.pooling_kernel_size"),
    )
    | {"clip.use_gelu": always(True)},
    (
        TensorRule(f"{TOWER}.patch_embedder.input_proj.weight", "v.patch_embd.weight", change=patches),
        TensorRule(f"{TOWER}.patch_embedder.position_embedding_table", "v.position_embd.weight"),
        *(
            rule
            for old, new in BLOCK.items()
            for rule in (
                TensorRule(f"{TOWER}.encoder.layers.{{}}.{old}.linear.weight", f"v.blk.{{}}.{new}.weight"),
                *(
                    TensorRule(f"{TOWER}.encoder.layers.{{}}.{old}.{end}", f"v.blk.{{}}.{new}.{end}", change=scalar)
                    for end in ("input_min", "input_max", "output_min", "output_max")
                ),
            )
        ),
        *(
            TensorRule(f"{TOWER}.encoder.layers.{{}}.{old}.weight", f"v.blk.{{}}.{new}.weight")
            for old, new in BLOCK_NORMS.items()
        ),
        TensorRule(f"{TOWER}.std_bias", "v.std_bias"),
        TensorRule(f"{TOWER}.std_scale", "v.std_scale"),
        TensorRule("model.embed_vision.embedding_projection.weight", "mm.input_projection.weight"),
    ),
)

FAMILY = GgufFamily(
    arch=always("gemma4"),
    language=language(),
    vision=VISION,
    unused=("model.audio_tower.", "model.embed_audio."),
    image="<|image|>",
    limits=limits,
    pieces="gemma4",
    visible=(
        *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>'),
    ),
    problems=problems,
)
