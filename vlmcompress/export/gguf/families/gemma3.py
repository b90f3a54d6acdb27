"""Gemma 3: llama.cpp's `gemma3` with its projector of that name."""

from __future__ import annotations

import math

from vlmcompress.export.gguf.families._parts import (
    CLIP_BLOCK,
    CLIP_KEYS,
    HEAD_NORMS,
    activation,
    blocks,
    both,
    decoder,
    text_keys,
    vision_keys,
)
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule, always, at

TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def sliding(facts: ModelFacts) -> list[bool]:
    """Per block, whether its attention is limited to a window."""
    return [kind == "sliding_attention" for kind in facts.config["text_config"]["layer_types"]]


def pooled(facts: ModelFacts) -> int:
    """Side, in patches, of the square that is pooled to one visual token."""
    vision = facts.config["vision_config"]
    return vision["image_size"] // vision["patch_size"] // math.isqrt(facts.config["mm_tokens_per_image"])


def factor(facts: ModelFacts) -> float | None:
    """Divisor of the positions in full attention, or None."""
    return facts.config["text_config"]["rope_parameters"]["full_attention"].get("factor")


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    text = facts.config["text_config"]
    problems, ropes = [], text["rope_parameters"]
    if ropes["full_attention"]["rope_type"] not in ("default", "linear") or (
        ropes["sliding_attention"]["rope_type"] != "default"
    ):
        problems.append("rotary positions of this kind are not written to GGUF")
    scale, heads = text["query_pre_attn_scalar"], text["num_attention_heads"]
    if scale not in (text["head_dim"], text["hidden_size"] / heads):
        problems.append(f"llama.cpp has no query_pre_attn_scalar of {scale}")
    return problems


FAMILY = GgufFamily(
    arch=always("gemma3"),
    language=GgufFile(
        text_keys(
            rope__freq_base=at("text_config.rope_parameters.full_attention.rope_theta", float),
            rope__freq_base_swa=at("text_config.rope_parameters.sliding_attention.rope_theta", float),
            rope__scaling__type=lambda facts: "linear" if factor(facts) else None,
            rope__scaling__factor=lambda facts: float(factor(facts)) if factor(facts) else None,  # type: ignore[arg-type]
            attention__sliding_window=at("text_config.sliding_window"),
            attention__sliding_window_pattern=sliding,
        ),
        decoder(norms=NORMS | HEAD_NORMS, norm_offset=1.0),
    ),
    vision=GgufFile(
        vision_keys("gemma3", projector__scale_factor=pooled, **CLIP_KEYS) | activation(),
        (
            *both(f"{TOWER}.embeddings.patch_embedding", "v.patch_embd"),
            TensorRule(f"{TOWER}.embeddings.position_embedding.weight", "v.position_embd.weight"),
            *blocks(f"{TOWER}.encoder.layers.{{}}", CLIP_BLOCK),
            *both(f"{TOWER}.post_layernorm", "v.post_ln"),
            TensorRule(f"{PROJECTOR}.mm_input_projection_weight", "mm.input_projection.weight"),
            TensorRule(f"{PROJECTOR}.mm_soft_emb_norm.weight", "mm.soft_emb_norm.weight", add=1.0),
        ),
    ),
    image="<start_of_image>",
    marker="\n\n{}\n\n",
    problems=problems,
)
