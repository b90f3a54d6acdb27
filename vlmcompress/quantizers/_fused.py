"""Which devices have kernels for what is otherwise done column by column."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from types import ModuleType

import torch

from vlmcompress.numerics import Format


@functools.cache
def kernels(device: torch.device, fmt: Format) -> ModuleType | None:
    """The Triton kernels (`_triton_kernels`) for tensors on `device`; None where torch does it all, as for float8."""
    if (fmt.kind, fmt.bits) == ("float", 8) or device.type != "cuda" or find_spec("triton") is None:
        return None
    from vlmcompress.quantizers import _triton_kernels

    return _triton_kernels
