"""NVIDIA Jetson AGX Thor (T5000) with 128 GB, which CPU and GPU share.

Figures: NVIDIA Jetson Thor data sheet: 2,070 sparse TFLOPS of FP4 and 1,035 of FP8, so half of each dense. What it does in
16 bits and in INT8 was not found in a source that we could read, and is left out. vLLM for it comes in containers of NVIDIA's.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets._nvidia import THOR

TARGET = replace(
    THOR,
    title="Jetson AGX Thor",
    memory=128,
    bandwidth=273,
    rates={"fp4": 1035, "fp8": 517},
)
