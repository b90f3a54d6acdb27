"""NVIDIA B200 with 180 GB (HGX, DGX).

Figures: NVIDIA Blackwell Architecture Technical Brief (HGX B200, without sparsity) and DGX B200 data sheet (1,440 GB and
64 TB/s of 8 GPUs).
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets._nvidia import BLACKWELL

TARGET = replace(
    BLACKWELL,
    title="B200",
    memory=180,
    bandwidth=8000,
    rates={"bf16": 2250, "fp8": 4500, "int8": 4500, "fp4": 9000},
)
