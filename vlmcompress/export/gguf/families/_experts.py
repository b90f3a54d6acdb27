"""Mixtures of experts: in ggml the experts of a block are one tensor, `[experts, out, in]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vlmcompress.export.gguf.families._parts import LANGUAGE
from vlmcompress.export.gguf.spec import ModelFacts, TensorRule, Value, at

MLP = f"{LANGUAGE}.layers.{{}}.mlp"


def count(facts: ModelFacts) -> int:
    """Experts of a block."""
    text = facts.config["text_config"]
    return text.get("num_experts") or text["num_local_experts"]


KEYS: dict[str, Value] = {
    "expert_count": count,
    "expert_used_count": at("text_config.num_experts_per_tok"),
    "expert_feed_forward_length": at("text_config.moe_intermediate_size"),
}


def half(number: int, transposed: bool) -> Callable[[Any, ModelFacts], Any]:
    """A function that selects gate (0) or up (1) projections of all experts, `[experts, out, in]`; `transposed`: inputs come
    first in the checkpoint."""
    return lambda weight, facts: (weight.mT if transposed else weight).chunk(2, dim=1)[number]


def rules(transposed: bool, module: str = MLP, router: str = "gate") -> tuple[TensorRule, ...]:
    """The tensors of routers and experts; experts are single layers if quantized, otherwise fused tensors.

    Args:
        transposed: the checkpoint's fused tensors have inputs first.
        module: memory name of the module with the experts and the router, whose own name is `router`.
    """
    return (
        TensorRule(f"{module}.{router}.weight", "blk.{}.ffn_gate_inp.weight"),
        *(
            TensorRule(f"{module}.experts.{{}}.{kind}_proj.weight", f"blk.{{}}.ffn_{kind}_exps.weight", stacked=True)
            for kind in ("gate", "up", "down")
        ),
        TensorRule(f"{module}.experts.gate_up_proj", "blk.{}.ffn_gate_exps.weight", change=half(0, transposed)),
        TensorRule(f"{module}.experts.gate_up_proj", "blk.{}.ffn_up_exps.weight", change=half(1, transposed)),
        TensorRule(
            f"{module}.experts.down_proj",
            "blk.{}.ffn_down_exps.weight",
            change=lambda weight, facts: weight.mT if transposed else weight,
        ),
    )
