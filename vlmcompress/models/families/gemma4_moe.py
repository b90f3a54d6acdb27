"""Gemma 4 with a mixture of experts: the tower and the attention of Gemma 4, and in each block experts next to the MLP.

Experts and MLP read the same hidden states, each by a norm of its own, and their outputs are added. The experts' norm takes no
scale in, as each of them would want one of its own. The router is a linear layer after a norm without weights; it stays in 16
bits. Such models have the model type of the dense ones: config.json's `num_experts` tells them apart.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models._spec import LinearGroup
from vlmcompress.models.families import gemma4

SPEC = replace(
    gemma4.SPEC,
    family="gemma4-moe",
    experts="experts",
    router="router.proj",
    groups=(
        *gemma4.SPEC.groups,
        LinearGroup("experts.{}.gate_up", ("experts.{}.gate_proj", "experts.{}.up_proj"), fused=True),
        LinearGroup("experts.{}.down", ("experts.{}.down_proj",), ("experts.{}.up_proj",), "linear"),
    ),
)
