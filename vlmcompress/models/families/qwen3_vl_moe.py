"""Qwen3-VL with a mixture of experts: the dense model's tower and attention, and in most blocks experts after a router.

No scale is folded into the norm before the experts: it feeds the router, which stays in 16 bits, and all experts, each of
which would need a different scale. (The few blocks without experts are smoothed as in the dense model.) Within an expert the
rows of `up_proj` can be divided for `down_proj`. Published checkpoints store the experts of a block as two tensors, `[experts,
in, out]`. Weights of a token's experts sum to one; vLLM needs `norm_topk_prob` in the config for that, which transformers 5
does not write.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models._spec import EXPERT_GROUPS, LLAMA
from vlmcompress.models.families import qwen3_vl

SPEC = replace(
    qwen3_vl.SPEC,
    family="qwen3-vl-moe",
    model_types=("qwen3_vl_moe",),
    groups=(*LLAMA, *EXPERT_GROUPS),
    experts="mlp.experts",
    router="mlp.gate",
    engine=replace(qwen3_vl.SPEC.engine, text_defaults=lambda text: {"norm_topk_prob": True}),
)
