"""Small integers packed into bytes and words, and scales kept in 16-bit floats, as the files of several formats have them.

Codes of b bits follow each other without gaps, least significant bits first: a word may begin within a code. The codes that
fill whole bytes (2 of 4 bits, 8 of 3) are read as one integer, with a byte for each code, and compacted in steps, each of which
doubles the length of the runs without gaps:

    4 bits: 0000bbbb 0000aaaa -> bbbbaaaa          2 bits: 4 codes in two steps          3 bits: 8 codes in three

On a CPU a part of the codes goes through all steps before the next, so that temporaries stay in its cache: about 2 GB of
codes a second on one core, against 0.1 with whole matrices of int32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from vlmcompress.utils.errors import UserError

_CHUNK = 1 << 19  # codes at a time on a CPU
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_bits(codes: Tensor, bits: int, *, signed: bool = False) -> Tensor:
    """The bytes of int8 codes in the order of their elements, uint8 `[bytes]`; what is left of the last byte is 0.

    Args:
        signed: store the lowest bits of the codes themselves; else those of code + 2^(bits - 1), which is not negative.
    """
    count, size = _whole_bytes(bits)
    length, flat = math.ceil(codes.numel() * bits / 8), codes.reshape(-1)
    flat = pad(flat, (0, -len(flat) % count), value=0 if signed else -(2 ** (bits - 1))).view(_INTEGERS[count])
    packed = torch.empty(len(flat), size, dtype=torch.uint8, device=codes.device)
    for part in parts(codes, len(flat), count):
        x = flat[part] & _fields(bits, 8, count)
        if not signed:
            x ^= _fields(1, 8, count, bits - 1)  # adds 2^(bits - 1) modulo 2^bits
        for step, width in _steps(bits, count):
            upper = x >> (step - width)
            if bits > 4:  # else the bits that the shift moves into other fields are beyond them
                upper &= _fields(width, 2 * step, count, width)
                x &= _fields(width, 2 * step, count)
            x |= upper
            x &= _fields(2 * width, 2 * step, count)
        packed[part] = x[:, None] if size == 1 else x.view(torch.uint8).view(-1, count)[:, :size]
    return packed.view(-1)[:length]


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The int8 codes in the bytes `packed`, and those of zeros that fill the last integer: the inverse of `pack_bits`."""
    count, size = _whole_bytes(bits)
    packed = pad(packed, (0, -len(packed) % size)).view(-1, size)
    codes = torch.empty(len(packed), count, dtype=torch.uint8, device=packed.device)
    for part in parts(packed, len(packed), count):
        x = codes[part].view(_INTEGERS[count]).view(-1)
        if size == 1:
            x.copy_(packed[part, 0])
        else:
            codes[part, :size], codes[part, size:] = packed[part], 0
        for step, width in reversed(_steps(bits, count)):
            upper = x << (step - width)
            if bits > 4:
                upper &= _fields(width, 2 * step, count, step)
                x &= _fields(width, 2 * step, count)
            x |= upper
            x &= _fields(width, step, count)
        codes[part] -= 2 ** (bits - 1)
    return codes.view(torch.int8).view(-1)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack int8 codes `[rows, n]` along the rows into int32 words `[rows, n * bits / 32]`, rounded up; what is left is 0."""
    words = math.ceil(codes.shape[1] * bits / 32)
    if codes.shape[1] * bits % 32:
        codes = pad(codes, (0, -codes.shape[1] % 32), value=-(2 ** (bits - 1)))
    return pack_bits(codes, bits).view(torch.int32).view(len(codes), -1)[:, :words].contiguous()


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """The int8 codes `[rows, columns]` in int32 words: the inverse of `pack_words`."""
    if columns * bits % 32:
        words = pad(words, (0, -words.shape[1] % bits))
    codes = unpack_bits(words.contiguous().view(-1).view(torch.uint8), bits)
    return codes.view(len(words), -1)[:, :columns].contiguous()


def parts(x: Tensor, length: int, codes: int) -> list[slice]:
    """Parts of `length` elements of `codes` codes each, to be worked on one after another: on a CPU such as its cache holds;
    elsewhere, where each part starts kernels, one."""
    step = max(1, _CHUNK // codes) if x.device.type == "cpu" else length
    return [slice(start, start + step) for start in range(0, length, step)]


def to_float16(scale: Tensor, what: str) -> Tensor:
    """Convert scales to float16 without loss.

    Raises:
        UserError: float16 cannot represent a scale, or one was clipped to its largest value; `what` names the format.
    """
    rounded = scale.to(torch.float16)
    changed = scale[rounded.float() != scale.float()]
    if count := changed.numel():
        example = changed[0].item()
        raise UserError(
            f"{count} of {scale.numel()} scales are no 16-bit floats, which {what} files hold, the first is {example:.3g}; "
            "write compressed-tensors"
        )
    if full := int((rounded == torch.finfo(torch.float16).max).sum()):  # after solving for float16 scales
        raise UserError(
            f"{full} of {scale.numel()} scales would be larger than 65,504, the largest of the 16-bit floats that {what} files "
            "hold; write compressed-tensors"
        )
    return rounded


def _whole_bytes(bits: int) -> tuple[int, int]:
    """The least number of codes that fill whole bytes, and the number of these."""
    return 8 // math.gcd(8, bits), bits // math.gcd(8, bits)


def _steps(bits: int, count: int) -> list[tuple[int, int]]:
    """How `count` codes are brought together: from one run of codes without gaps to the next, and bits of a run."""
    return [(8 << step, bits << step) for step in range(count.bit_length() - 1)]


def _fields(width: int, step: int, count: int, start: int = 0) -> int:
    """An integer of `count` bytes, signed as torch has it, with `width` ones from bit `start` of each `step` bits."""
    mask = sum(((1 << width) - 1) << first + start for first in range(0, 8 * count, step))
    return mask - (1 << 8 * count) if count > 1 and mask >> (8 * count - 1) else mask
