"""NVIDIA GeForce RTX 5090 with 32 GB.

Figures: NVIDIA RTX Blackwell GPU Architecture whitepaper, without sparsity. FP8 is that with sums in FP32, half as fast as
with FP16.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets._nvidia import BLACKWELL_GEFORCE

TARGET = replace(
    BLACKWELL_GEFORCE,
    title="RTX 5090",
    memory=32,
    bandwidth=1792,
    rates={"bf16": 209.5, "fp8": 419, "int8": 838, "fp4": 1676},
)
