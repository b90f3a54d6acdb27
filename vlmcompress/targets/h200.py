"""NVIDIA H200 with 141 GB."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.targets._nvidia import HOPPER

TARGET = replace(HOPPER, title="H200", memory=141)
