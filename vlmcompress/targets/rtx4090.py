"""NVIDIA GeForce RTX 4090 with 24 GB: small enough that 4 bits are the better default."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.targets import Goal
from vlmcompress.targets._nvidia import ADA

_SCHEMES: dict[Goal | None, str] = {None: "awq", "memory": "awq", "throughput": "fp8"}
TARGET = replace(ADA, title="RTX 4090", memory=24, schemes=_SCHEMES)
