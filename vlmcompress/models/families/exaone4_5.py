"""EXAONE 4.5: the tower of Qwen2.5-VL with grouped-query attention, EXAONE 4 decoder, positions in one dimension.

A decoder block has norms after attention and after the MLP only, so nothing before its queries or its gate can be scaled.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models._spec import ATTENTION_OUT, DOWN, GATE_UP, QKV, QWEN_ENGINE, MlxClass, MtpHead
from vlmcompress.models.families import qwen2_5_vl

SPEC = replace(
    qwen2_5_vl.SPEC,
    family="exaone4-5",
    model_types=("exaone4_5",),
    groups=(replace(QKV, smooth=()), ATTENTION_OUT, replace(GATE_UP, smooth=()), DOWN),
    mixed_blocks="attention in windows",
    mtp=MtpHead("mtp", "num_nextn_predict_layers", top=True),
    names=replace(qwen2_5_vl.SPEC.names, hub=(), prefixes=QWEN_ENGINE),
    images=replace(qwen2_5_vl.SPEC.images, positions="1d"),
    engine=replace(qwen2_5_vl.SPEC.engine, mlx=MlxClass()),
)
