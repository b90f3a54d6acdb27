"""Scales of microscaling formats (MX): a power of two for each 32 numbers, stored as its exponent plus 127 in a byte (E8M0).

Sources: Open Compute Project, OCP Microscaling Formats 1.0, sections 5.4 and 6.3; compressed_tensors 0.19
`quantization/utils/mxfp_utils.py` (rounding), `compressors/mx_utils.py` (bytes).
"""

from __future__ import annotations

import torch
from torch import Tensor

_BIAS, _MANTISSA = 127, 23  # of float32, whose exponent field is the stored byte
_UP = 1 << (_MANTISSA - 2)  # rounds up from 1.75 times a power of two on


def on_grid(scale: Tensor) -> Tensor:
    """Round float32 scales to powers of two, down, or up from 1.75 times the lower power on; the result is finite and
    positive.

    Zero, the scale of a block of zeros, becomes 1.
    """
    # A float32 is a sign, the exponent plus 127 and 23 bits of mantissa: 1/4 added to the latter carries from 1.75 on.
    byte = (scale.contiguous().view(torch.int32) + _UP) >> _MANTISSA
    # E8M0 has no sign, no zero and no infinity; 255 is its NaN, and 0 would be 2^-127, a subnormal that engines may flush.
    byte = byte.clamp_(1, 2 * _BIAS).masked_fill_(scale == 0, _BIAS)
    return byte.bitwise_left_shift_(_MANTISSA).view(torch.float32)


def stored(scale: Tensor) -> Tensor:
    """The stored bytes (exponent plus 127), uint8, of float32 scales that are powers of two."""
    return (scale.contiguous().view(torch.int32) >> _MANTISSA).to(torch.uint8)


def steps(stored: Tensor) -> Tensor:
    """The float32 powers of two for stored bytes; the inverse of `stored`."""
    return torch.exp2(stored.float() - _BIAS)
