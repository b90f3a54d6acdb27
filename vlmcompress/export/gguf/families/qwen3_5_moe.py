"""Qwen3.5, 3.6 and 3.8 with a mixture of experts: llama.cpp's `qwen35moe` with Qwen3-VL's projector."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.export.gguf.families import _delta_net, _experts, qwen3_5
from vlmcompress.export.gguf.spec import TensorRule, always, at

SHARED = (
    TensorRule(f"{_experts.MLP}.shared_expert_gate.weight", "blk.{}.ffn_gate_inp_shexp.weight"),
    *(
        TensorRule(f"{_experts.MLP}.shared_expert.{kind}_proj.weight", f"blk.{{}}.ffn_{kind}_shexp.weight")
        for kind in ("gate", "up", "down")
    ),
)

FAMILY = replace(
    qwen3_5.FAMILY,
    arch=always("qwen35moe"),
    language=_delta_net.language(
        (*_experts.rules(transposed=False), *SHARED),
        expert_shared_feed_forward_length=at("text_config.shared_expert_intermediate_size"),
        **_experts.KEYS,
    ),
)
