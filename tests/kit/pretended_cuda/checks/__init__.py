"""What runs on the pretended device, in processes of their own: `tests/test_pretended_cuda.py` hands these files to pytest.

    numbers    what comes out is what comes out on a CPU         places    what is computed where

To add a phase of a run, call its function within `hidden()` and without, and compare: the CPU is the oracle, up to the order of
sums (`numbers`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vlmcompress.recipe import Recipe, resolve

CUDA = torch.device("cuda", 0)
FAMILIES = ("llava", "qwen2-5-vl", "qwen3-vl")


def recipe(world: Path, out: Path, family: str = "llava", **keys: Any) -> Recipe:
    """A recipe for a tiny model and calibration data of the folder `world`."""
    data = {"data": str(world / "calib.jsonl"), "samples": 4}
    return resolve({"model": str(world / family), "out": str(out), "calibrate": data} | keys).recipe
