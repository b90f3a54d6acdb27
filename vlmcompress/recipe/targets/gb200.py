"""NVIDIA GB200: one of the two GPUs of a superchip, with 186 GB.

Figures: NVIDIA Blackwell Architecture Technical Brief (without sparsity) and GB200 NVL72 data sheet (13.4 TB and 576 TB/s of
72 GPUs).
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets._nvidia import BLACKWELL

TARGET = replace(
    BLACKWELL,
    title="GB200",
    memory=186,
    bandwidth=8000,
    rates={"bf16": 2500, "fp8": 5000, "int8": 5000, "fp4": 10000},
)
