"""Gemma 4 with a mixture of experts next to each block's MLP: llama.cpp's `gemma4`, too.

The router's scale of an expert is in ggml that of its output.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.export.gguf.families import _experts, gemma4
from vlmcompress.export.gguf.families._parts import LANGUAGE
from vlmcompress.export.gguf.spec import TensorRule, at

BLOCK = f"{LANGUAGE}.layers.{{}}"
NORMS = {
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}

FAMILY = replace(
    gemma4.FAMILY,
    language=gemma4.language(
        *_experts.rules(transposed=False, module=BLOCK, router="router.proj"),
        *(TensorRule(f"{BLOCK}.{old}.weight", f"blk.{{}}.{new}.weight") for old, new in NORMS.items()),
        TensorRule(f"{BLOCK}.router.scale", "blk.{}.ffn_gate_inp.scale"),
        TensorRule(f"{BLOCK}.router.per_expert_scale", "blk.{}.ffn_down_exps.scale"),
        **(_experts.KEYS | {"expert_used_count": at("text_config.top_k_experts")}),
    ),
)
