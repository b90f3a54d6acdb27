"""NVIDIA Jetson AGX Orin with 64 GB, which CPU and GPU share.

Figures: NVIDIA Jetson AGX Orin Series Technical Brief: 170 sparse INT8 TOPS on the GPU, so 85 dense, and half as many of
16 bits. The 275 TOPS of advertisements count its DLA, which vLLM does not use. vLLM for it comes in containers of NVIDIA's.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.recipe.targets._nvidia import AMPERE

TARGET = replace(
    AMPERE,
    title="Jetson AGX Orin",
    memory=64,
    capability=(8, 7),
    bandwidth=204.8,
    rates={"bf16": 42.5, "int8": 85},
)
