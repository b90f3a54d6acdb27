"""NVIDIA A10G with 24 GB, the GPU of AWS' G5 instances: no FP8 tensor cores, fast INT8.

Figures: NVIDIA A10G data sheet, without sparsity. The A10 has the same memory and more arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets._nvidia import AMPERE

TARGET = replace(
    AMPERE,
    title="A10G",
    memory=24,
    capability=(8, 6),
    bandwidth=600,
    rates={"bf16": 70, "int8": 140},
)
