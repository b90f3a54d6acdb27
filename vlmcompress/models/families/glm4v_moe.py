"""GLM-4.5V and GLM-4.6V: the tower of GLM-4.1V, and a GLM-4.5 decoder with a mixture of experts after its first blocks.

A block has two norms. The second one feeds the MLP in the first blocks, where a scale can be folded into it, and in all others
a router, the experts and one shared expert, where none can. Gate and up are two layers, unlike those of the dense models.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models._spec import EXPERT_GROUPS, LLAMA, LinearGroup
from vlmcompress.models.families import glm4v

SPEC = replace(
    glm4v.SPEC,
    family="glm4v-moe",
    model_types=("glm4v_moe",),
    groups=(
        *LLAMA,
        *EXPERT_GROUPS,
        LinearGroup(
            "shared_expert.gate_up", ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), fused=True
        ),
        LinearGroup("shared_expert.down", ("mlp.shared_experts.down_proj",), ("mlp.shared_experts.up_proj",), "linear"),
    ),
    experts="mlp.experts",
    router="mlp.gate",
    engine=replace(glm4v.SPEC.engine, embedding_whole=True),
)
