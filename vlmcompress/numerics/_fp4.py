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
_HALF = 0x30  # 0.5 as float8_e4m3fn; from 1 on the byte of a value is 0x30 plus four times its index
_EXPONENT = 0x7F800000  # the bits of a float32 that say its power of two
_CHUNK = 1 << 16


def round_fp4(x: Tensor) -> Tensor:
    """Round `x` to the nearest 4-bit floats, in place. Those of magnitude 6 or more become 6.

    Adding and taking away 1.5 * 2^23 steps rounds to a multiple of the step, which is half of the power of two below `|x|`, and
    half of 1 below that.
    """
    if x.dtype != torch.float32:
        return x.copy_(round_fp4(x.float()))
    power = x.abs().clamp_(1, FLOAT4_MAX).view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32)
    magic = power.mul_(1.5 * 2**22)
    return torch.copysign(x.clamp_(-FLOAT4_MAX, FLOAT4_MAX).add(magic).sub_(magic), x, out=x)


def find_global_scale(tensors: Iterable[Tensor]) -> Tensor:
    """The number g, float32 `[1]`, that the float8 scales of some tensors are relative to: `448 * 6 / max|x|`.

    It is a divisor: the largest block has the largest float8 as its scale. Layers that an engine makes one matrix of must share
    one, so give all of their weights. 1 where all are zero.
    """
    return divisor(torch.stack([x.abs().amax().float() for x in tensors]).amax())


def divisor(largest: Tensor) -> Tensor:
    """Compute `448 * 6 / largest`, float32 `[1]`, for the largest magnitude of a matrix; 1 where that is no number."""
    ratio = FLOAT8_MAX * FLOAT4_MAX / largest.float().clamp_min(torch.finfo(torch.float32).tiny)
    return ratio.nan_to_num(nan=1.0, posinf=1.0).view(1)


def on_grid(scale: Tensor, divided: Tensor) -> Tensor:
    """Round float32 scales to what is stored, float8 over the global scale `divided [1]`, finite and above zero: float32."""
    return stored(scale * divided).float() / divided


def stored(scale: Tensor) -> Tensor:
    """Round float32 scales, times the global scale, to float8; zero becomes the type's epsilon."""
    rounded = scale.clamp(max=FLOAT8_MAX).to(FLOAT8)
    return torch.where(rounded.float() == 0, torch.finfo(FLOAT8).eps, rounded.float()).to(FLOAT8)


def pack_fp4(q: Tensor) -> Tensor:
    """Pack 4-bit floats `q [out, in]`, float8 as of `numerics.quantize`, two in a byte: uint8 `[out, in / 2]`.

    The first of two is in the lower bits. Raises ValueError for an odd number of columns.
    """
    if q.shape[-1] % 2:
        raise ValueError(f"two 4-bit floats fill a byte, and {q.shape[-1]} columns are odd")
    packed = torch.empty(*q.shape[:-1], q.shape[-1] // 2, dtype=torch.uint8, device=q.device)
    for rows in _rows(q):
        byte = q[rows].view(torch.uint8)
        magnitude = byte & 0x7F
        index = ((magnitude - _HALF) >> 2).where(magnitude > _HALF, (magnitude == _HALF).to(torch.uint8))
        code = index | (byte >> 4 & 8)
        packed[rows] = code[..., ::2] | code[..., 1::2] << 4
    return packed


def unpack_fp4(packed: Tensor) -> Tensor:
    """The 4-bit floats of bytes `packed [out, in / 2]` as float8 `[out, in]`; the inverse of `pack_fp4`."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=packed.device).to(FLOAT8).view(torch.uint8)
    values = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.uint8, device=packed.device)
    for rows in _rows(packed):
        codes = torch.stack((packed[rows] & 15, packed[rows] >> 4), -1)
        values[rows] = table[codes.int()].flatten(-2)
    return values.view(FLOAT8)


def _rows(x: Tensor) -> list[slice]:
    step = max(1, _CHUNK // max(1, x.shape[-1]))
    return [slice(a, a + step) for a in range(0, len(x), step)]
