"""Qwen3.5, 3.6 and 3.8 with a mixture of experts: the dense model with experts after a router in every block.

In addition each block has one shared expert, whose output is scaled by `shared_expert_gate`, a layer with one output that
stays in 16 bits like the router. No scale is folded into the norm before them: it feeds the router and every expert, each of
which would need a different scale. Published checkpoints store the experts of a block as two tensors, `[experts, out, in]`;
FP8 ones store them separately.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models._spec import ATTENTION_OUT, EXPERT_GROUPS, GATED_DELTA_NET, QKV, SHARED_EXPERT
from vlmcompress.models.families import qwen3_5

SPEC = replace(
    qwen3_5.SPEC,
    family="qwen3-5-moe",
    model_types=("qwen3_5_moe",),
    groups=(*GATED_DELTA_NET, QKV, ATTENTION_OUT, *SHARED_EXPERT, *EXPERT_GROUPS),
    experts="mlp.experts",
    router="mlp.gate",
)
