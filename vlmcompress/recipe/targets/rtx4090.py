"""NVIDIA GeForce RTX 4090 with 24 GB: small enough that 4 bits are the better default.

Figures: NVIDIA Ada GPU Architecture whitepaper, without sparsity. FP8 is that with sums in FP32, half as fast as with FP16.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets import Goal
from vlmcompress.recipe.targets._nvidia import ADA

_SCHEMES: dict[Goal | None, str] = {None: "gptq-plus", "memory": "gptq-plus", "throughput": "fp8"}
TARGET = replace(
    ADA,
    title="RTX 4090",
    memory=24,
    schemes=_SCHEMES,
    bandwidth=1008,
    rates={"bf16": 165.2, "fp8": 330.3, "int8": 660.6},
)
