"""NVIDIA L40S with 48 GB."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.targets._nvidia import ADA

TARGET = replace(ADA, title="L40S", memory=48)
