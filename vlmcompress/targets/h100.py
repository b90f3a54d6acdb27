"""NVIDIA H100 with 80 GB."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.targets._nvidia import HOPPER

TARGET = replace(HOPPER, title="H100", memory=80)
