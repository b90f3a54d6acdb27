"""NVIDIA H200 with 141 GB (SXM).

Figures: NVIDIA H200 Tensor Core GPU data sheet, which states them with sparsity: half of 1,979, 3,958 and 3,958.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets._nvidia import HOPPER

TARGET = replace(
    HOPPER,
    title="H200",
    memory=141,
    bandwidth=4800,
    rates={"bf16": 989.4, "fp8": 1979, "int8": 1979},
)
