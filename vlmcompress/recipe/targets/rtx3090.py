"""NVIDIA GeForce RTX 3090 with 24 GB.

Figures: NVIDIA Ampere GA102 GPU Architecture whitepaper, without sparsity, sums in FP32.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets._nvidia import AMPERE

TARGET = replace(
    AMPERE,
    title="RTX 3090",
    memory=24,
    capability=(8, 6),
    bandwidth=936,
    rates={"bf16": 71, "int8": 284},
)
