"""4-bit floats of NVFP4 (e2m1: a sign, two bits of exponent, one of mantissa) and the float8 scales of their blocks.

The values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; a code is their index, plus 8 for a negative one. Halfway
cases go to the even code, as in hardware and compressed-tensors (`utils/fp4_utils.py`): 0.25 to 0, 0.75 to 1, 5 to 4.
A zero keeps the sign of what was rounded to it.
Sources: Open Compute Project, OCP Microscaling Formats 1.0, section 5.3.3; compressed_tensors 0.19 `compressors/nvfp4` (bytes,
the divisor), `quantization/utils/helpers.py` (scales).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vlmcompress.numerics._formats import FLOAT4_MAX, FLOAT8, FLOAT8_MAX

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT = 0x7F800000  # exponent bits of a float32
_CHUNK = 1 << 16  # codes packed at a time on a CPU, so that temporaries stay in its cache


def round_fp4(x: Tensor) -> Tensor:
    """Round float32 `x` to the nearest 4-bit floats, in place, and return it. Magnitudes above 6 become 6.

    Adding and subtracting 1.5 * 2^23 steps rounds to a multiple of the step. The step is half of the power of two below `|x|`,
    and 0.5 for `|x| < 1`.
    """
    if x.dtype != torch.float32:
        return x.copy_(round_fp4(x.float()))
    # The power of two below |x|, from 1 (whose step the subnormals 0 and 0.5 share) to 4: its bits without the mantissa's.
    power = x.abs().clamp_(1, FLOAT4_MAX).view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32)
    # One bit of mantissa: the step is power / 2. A float32 of 1.5 * 2^23 steps has the step as the unit of its last bit, so the
    # sum is rounded there by the processor itself, halves to even.
    magic = power.mul_(1.5 * 2**22)
    return torch.copysign(x.clamp_(-FLOAT4_MAX, FLOAT4_MAX).add(magic).sub_(magic), x, out=x)


def find_global_scale(tensors: Iterable[Tensor]) -> Tensor:
    """Compute the global scale of NVFP4 for some tensors, `448 * 6 / max|x|`: float32 `[1]`; 1 where all are zero.

    It is a divisor: the largest block gets the largest float8 as its scale. Layers that an engine fuses into one matrix must
    share it, so pass all of their weights.
    """
    return divisor(torch.stack([x.abs().amax().float() for x in tensors]).amax())


def divisor(largest: Tensor) -> Tensor:
    """Compute `448 * 6 / largest`, float32 `[1]`, for the largest magnitude of a matrix; 1 where the quotient is not
    finite."""
    # `generate_gparam` of compressed-tensors: the largest block gets the scale 448, its largest weight the code 6.
    ratio = FLOAT8_MAX * FLOAT4_MAX / largest.float().clamp_min(torch.finfo(torch.float32).tiny)
    return ratio.nan_to_num(nan=1.0, posinf=1.0).view(1)


def on_grid(scale: Tensor, divided: Tensor) -> Tensor:
    """Round float32 scales to the stored values, float8 divided by the global scale `divided [1]`; returns float32,
    positive."""
    return stored(scale * divided).float() / divided


def stored(scale: Tensor) -> Tensor:
    """Round float32 scales, already multiplied by the global scale, to float8; zero becomes float8's epsilon."""
    rounded = scale.clamp(max=FLOAT8_MAX).to(FLOAT8)  # e4m3fn has no infinity: values above 448 would become NaN
    return torch.where(rounded.float() == 0, torch.finfo(FLOAT8).eps, rounded.float()).to(FLOAT8)


def pack_fp4(q: Tensor) -> Tensor:
    """Pack 4-bit floats `q [out, in]`, stored as float8, two to a byte: uint8 `[out, in / 2]`.

    The first of two is in the lower bits. Raises ValueError for an odd number of columns.

    As float8 (a sign, four bits of exponent, three of mantissa) the eight magnitudes are the bytes

        0: 0000000   0.5: 0110000   1: 0111000   1.5: 0111100   2: 1000000   3: 1000100   4: 1001000   6: 1001100

    so bits 2 and 3 are the lower bits of the index, and bit 6 is its upper one; only 0.5 needs bits 5 and 3, to distinguish it
    from 0.
    """
    if q.shape[-1] % 2:
        raise ValueError(f"4-bit floats are packed in pairs, and {q.shape[-1]} columns are an odd number")
    packed = torch.empty(*q.shape[:-1], q.shape[-1] // 2, dtype=torch.uint8, device=q.device)
    for rows in _rows(q):
        pair = q[rows].contiguous().view(torch.int16)  # two neighbours, the first in the lower byte
        code = (pair >> 2 & 0x0303) | (pair >> 4 & 0x0C0C)  # bits 2 and 3 of each byte; bits 6 and 7, the sign
        code |= pair >> 5 & ~(pair >> 3) & 0x0101  # 0.5
        packed[rows] = code | code >> 4  # the lower byte is kept
    return packed


def unpack_fp4(packed: Tensor) -> Tensor:
    """Unpack bytes `[out, in / 2]` to 4-bit floats in float8 `[out, in]`; the inverse of `pack_fp4`."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=packed.device).to(FLOAT8).view(torch.uint8)
    values = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.uint8, device=packed.device)
    for rows in _rows(packed):
        codes = torch.stack((packed[rows] & 15, packed[rows] >> 4), -1)
        values[rows] = table[codes.int()].flatten(-2)
    return values.view(FLOAT8)


def _rows(x: Tensor) -> list[slice]:
    """Split the rows of `x [out, in]` into parts of about `_CHUNK` codes on a CPU; one part elsewhere, as each part costs
    launches."""
    if x.device.type != "cpu":
        return [slice(None)]
    step = max(1, _CHUNK // max(1, x.shape[-1]))
    return [slice(a, a + step) for a in range(0, len(x), step)]
