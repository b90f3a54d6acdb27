"""Which devices have Triton kernels for the column by column steps of quantizers."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from types import ModuleType

import torch

from vlmcompress.numerics import Format

SWITCH = "VLMCOMPRESS_TRITON"  # 0: use torch only, in case the kernels fail on a machine


@functools.cache
def kernels(device: torch.device, fmt: Format) -> ModuleType | None:
    """The Triton kernels (`_triton_kernels`) for tensors on `device`; None where torch is used, for example for float8.

    They run on GPUs, and on any device in Triton's interpreter (`TRITON_INTERPRET=1`).
    """
    runs = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    runs = runs and (fmt.kind, fmt.bits) != ("float", 8)
    if not runs or os.environ.get(SWITCH) == "0" or find_spec("triton") is None:
        return None
    from vlmcompress.quantization.schemes import _triton_kernels

    return _triton_kernels
