"""NVIDIA B200 with 180 GB."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.targets._nvidia import BLACKWELL

TARGET = replace(BLACKWELL, title="B200", memory=180)
