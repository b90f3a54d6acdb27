"""Scales of microscaling formats (MX): a power of two for each 32 numbers, stored as its exponent plus 127 in a byte (E8M0).

Sources: Open Compute Project, OCP Microscaling Formats 1.0, sections 5.4 and 6.3; compressed_tensors 0.19
`quantization/utils/mxfp_utils.py` (rounding), `compressors/mx_utils.py` (bytes).
"""

from __future__ import annotations

import torch
from torch import Tensor

_BIAS, _MANTISSA = 127, 23  # of float32, whose field of the exponent is the byte
_UP = 1 << (_MANTISSA - 2)  # from 1.75 times a power of two on the next one is taken


def on_grid(scale: Tensor) -> Tensor:
    """Round float32 scales to powers of two, finite and above zero: the one below, from 1.75 times that on the one above.

    Zero, of a block of zeros, becomes 1, whose square is a number like any other.
    """
    # A float32 is a sign, the exponent plus 127 and 23 bits of mantissa: 1/4 added to the latter carries from 1.75 on.
    byte = (scale.contiguous().view(torch.int32) + _UP) >> _MANTISSA
    # E8M0 has no sign, no zero and no infinity; 255 is its NaN, and 0 would be 2^-127, a subnormal that engines may flush.
    byte = byte.clamp_(1, 2 * _BIAS).masked_fill_(scale == 0, _BIAS)
    return byte.bitwise_left_shift_(_MANTISSA).view(torch.float32)


def stored(scale: Tensor) -> Tensor:
    """The bytes of scales, which are float32 powers of two: uint8."""
    return (scale.contiguous().view(torch.int32) >> _MANTISSA).to(torch.uint8)


def steps(stored: Tensor) -> Tensor:
    """The float32 powers of two of bytes; the inverse of `stored`."""
    return torch.exp2(stored.float() - _BIAS)
