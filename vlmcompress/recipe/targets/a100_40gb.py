"""NVIDIA A100 with 40 GB: no FP8 tensor cores, fast INT8.

Figures: NVIDIA A100 Tensor Core GPU data sheet, without sparsity.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets._nvidia import AMPERE

TARGET = replace(
    AMPERE,
    title="A100 40GB",
    memory=40,
    bandwidth=1555,
    rates={"bf16": 312, "int8": 624},
)
