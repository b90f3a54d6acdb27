"""NVIDIA GeForce RTX 3090 with 24 GB."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.targets._nvidia import AMPERE

TARGET = replace(AMPERE, title="RTX 3090", memory=24, capability=(8, 6))
