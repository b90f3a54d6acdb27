"""Gemma 4 with a mixture of experts: the tower and the attention of Gemma 4, and in each block experts next to the MLP.

Experts and MLP read the same hidden states, each through its own norm, and their outputs are added. No scale is folded into
the experts' norm, as each expert would need a different one. The router is a linear layer after a norm without weights; it
stays in 16 bits. Such models have the model type of the dense ones: config.json's `num_experts` distinguishes them.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models._spec import LinearGroup
from vlmcompress.models.families import gemma4

SPEC = replace(
    gemma4.SPEC,
    family="gemma4-moe",
    groups=(
        *gemma4.SPEC.groups,
        LinearGroup("experts.{}.gate_up", ("experts.{}.gate_proj", "experts.{}.up_proj"), fused=True),
        LinearGroup("experts.{}.down", ("experts.{}.down_proj",), ("experts.{}.up_proj",), "linear"),
    ),
    experts="experts",
    router="router.proj",
)
