"""Which devices have kernels for what is otherwise done column by column."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from types import ModuleType

import torch

from vlmcompress.numerics import Format

SWITCH = "VLMCOMPRESS_TRITON"  # 0: torch does it all, should the kernels not work somewhere


@functools.cache
def kernels(device: torch.device, fmt: Format) -> ModuleType | None:
    """The Triton kernels (`_triton_kernels`) for tensors on `device`; None where torch does it all, as for float8.

    They are a GPU's, and any device's in Triton's interpreter (`TRITON_INTERPRET=1`).
    """
    runs = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    runs = runs and (fmt.kind, fmt.bits) != ("float", 8)
    if not runs or os.environ.get(SWITCH) == "0" or find_spec("triton") is None:
        return None
    from vlmcompress.quantization.schemes import _triton_kernels

    return _triton_kernels
