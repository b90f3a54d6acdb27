"""Qwen3-VL with a mixture of experts: llama.cpp's `qwen3vlmoe` with the dense model's projector."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.export.gguf.families import _experts, qwen3_vl
from vlmcompress.export.gguf.families._parts import rope_problems
from vlmcompress.export.gguf.spec import GgufFile, ModelFacts, always

DENSE = qwen3_vl.FAMILY.language


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    text = facts.config["text_config"]
    dense = bool(text.get("mlp_only_layers")) or text.get("decoder_sparse_step", 1) != 1
    return rope_problems(facts) + (
        ["llama.cpp has experts in each block; this model has blocks without"] if dense else []
    )


FAMILY = replace(
    qwen3_vl.FAMILY,
    arch=always("qwen3vlmoe"),
    language=GgufFile(
        dict(DENSE.keys) | {f"{{arch}}.{name}": value for name, value in _experts.KEYS.items()},
        (*DENSE.rules, *_experts.rules(transposed=True)),
    ),
    problems=problems,
)
