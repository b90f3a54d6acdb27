"""InternVL: llama.cpp's `qwen2`, `qwen3` or `llama` with its `internvl` projector; images are cut into tiles."""

from __future__ import annotations

from typing import Any

from vlmcompress.export.gguf.families._parts import (
    HEAD_NORMS,
    NORMS,
    SIZES,
    activation,
    blocks,
    both,
    decoder,
    first_last,
    rope_problems,
    text_keys,
    vision_keys,
)
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule, Value, at

TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
BLOCK = {
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.projection_layer": "attn_out",
    "layernorm_before": "ln1",
    "layernorm_after": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
EXTRA = {
    "attention.q_norm.weight": "attn_q_norm.weight",
    "attention.k_norm.weight": "attn_k_norm.weight",
    "lambda_1": "ls1.weight",
    "lambda_2": "ls2.weight",
}


def first(path: str) -> Value:
    """The first of the two equal numbers under a path."""
    read = at(path)
    return lambda facts: read(facts)[0] if isinstance(read(facts), list) else read(facts)


def rows(weight: Any, facts: ModelFacts) -> Any:
    """A matrix without the axis of images."""
    return weight[0]


def positions(weight: Any, facts: ModelFacts) -> Any:
    """The matrix of positions in llama.cpp's order."""
    return first_last(rows(weight, facts), facts)


def decoder_kind(facts: ModelFacts) -> str:
    """llama.cpp's architecture of the decoder."""
    return facts.config["text_config"]["model_type"]


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    problems = rope_problems(facts)
    if decoder_kind(facts) not in ("qwen2", "qwen3"):
        problems.append(f"a decoder of the kind '{decoder_kind(facts)}' is not written for InternVL")
    return problems


FAMILY = GgufFamily(
    arch=decoder_kind,
    language=GgufFile(text_keys(), decoder(biases=True, norms=NORMS | HEAD_NORMS)),
    vision=GgufFile(
        vision_keys(
            "internvl",
            image_size=first("vision_config.image_size"),
            patch_size=first("vision_config.patch_size"),
            **SIZES,
            attention__layer_norm_epsilon=at("vision_config.layer_norm_eps", float),
            projector__scale_factor=lambda facts: round(1 / facts.config["downsample_ratio"]),
            preproc_min_tiles=lambda facts: facts.image.get("min_patches"),
            preproc_max_tiles=lambda facts: facts.image.get("max_patches"),
        )
        | activation(),
        (
            TensorRule(f"{TOWER}.embeddings.cls_token", "v.class_embd", change=rows),
            TensorRule(f"{TOWER}.embeddings.position_embeddings", "v.position_embd.weight", change=positions),
            *both(f"{TOWER}.embeddings.patch_embeddings.projection", "v.patch_embd"),
            *blocks(f"{TOWER}.encoder.layer.{{}}", BLOCK),
            *(TensorRule(f"{TOWER}.encoder.layer.{{}}.{old}", f"v.blk.{{}}.{new}") for old, new in EXTRA.items()),
            *both(f"{PROJECTOR}.layer_norm", "mm.model.mlp.0"),
            *both(f"{PROJECTOR}.linear_1", "mm.model.mlp.1"),
            *both(f"{PROJECTOR}.linear_2", "mm.model.mlp.3"),
        ),
    ),
    image="<IMG_CONTEXT>",
    problems=problems,
)
