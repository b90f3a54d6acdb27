"""NVIDIA L40S with 48 GB.

Figures: NVIDIA L40S data sheet, without sparsity.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets._nvidia import ADA

TARGET = replace(
    ADA,
    title="L40S",
    memory=48,
    bandwidth=864,
    rates={"bf16": 362, "fp8": 733, "int8": 733},
)
