"""Qwen3.5, 3.6 and 3.8 with a mixture of experts: the dense model with experts after a router in every block.

Next to them each block has one shared expert, whose output is scaled by `shared_expert_gate`, a layer of one output that stays
in 16 bits as the router does. The norm before all of these takes no scale in: it feeds the router and every expert, each of
which would want a scale of its own. Published checkpoints hold the experts of a block as two tensors, `[experts, out, in]`;
those in FP8 have them one by one.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models._spec import ATTENTION_OUT, EXPERT_GROUPS, GATED_DELTA_NET, QKV, SHARED_EXPERT
from vlmcompress.models.families import qwen3_5

SPEC = replace(
    qwen3_5.SPEC,
    family="qwen3-5-moe",
    model_types=("qwen3_5_moe",),
    experts="mlp.experts",
    router="mlp.gate",
    groups=(*GATED_DELTA_NET, QKV, ATTENTION_OUT, *SHARED_EXPERT, *EXPERT_GROUPS),
)
