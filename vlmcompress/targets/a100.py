"""NVIDIA A100 with 80 GB: no FP8 tensor cores, fast INT8."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.targets._nvidia import AMPERE

TARGET = replace(AMPERE, title="A100 80GB", memory=80)
