"""Blocks of weights as ggml stores them: `Q4_0`, `Q4_1`, `Q8_0` and `NVFP4`.

| type | bytes of a block | weight |
|---|---|---|
| Q4_0, 32 weights | scale d (float16), 16 bytes | d * (q - 8), q from 0 to 15 |
| Q4_1, 32 weights | scale d, minimum m (float16), 16 bytes | d * q + m |
| Q8_0, 32 weights | scale d (float16), 32 bytes | d * q, q from -128 to 127 |
| NVFP4, 64 weights | 4 scales d (float8), 4 times 8 bytes | d * q, q a 4-bit float, times a number of the matrix |

Byte i of 4-bit codes holds the code of weight i in its lower half and that of weight i + 16 in its upper half (for NVFP4: i + 8
of 16 weights). Our symmetric codes are q - 8 and q, so that Q4_0 and Q8_0 hold them bit for bit; larger groups repeat their
scale. Codes and scales of Q4_1 are exact as well; the minimum, scale times zero point, has up to 15 bits and is rounded to the
11 of a float16: at most 15 / 2048 = 0.7% of a step. NVFP4's number of the matrix is the reciprocal of our global scale, in a
tensor of its own.
Source: llama.cpp, `ggml/src/ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmcompress.export.packing import parts, to_float16
from vlmcompress.numerics import Format, QTensor, pack_fp4
from vlmcompress.utils.errors import UserError

BLOCK, FP4_BLOCK = 32, 64
BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "NVFP4": 36}
"""ggml type -> bytes of a block."""


def block_size(kind: str) -> int:
    """Weights of a block of a ggml type."""
    return FP4_BLOCK if kind == "NVFP4" else BLOCK


MOST = 0.01  # largest error of a minimum, in steps; only scales near float16's smallest values exceed it


def block_type(fmt: Format) -> str:
    """The ggml type for weights of a format. Raises `UserError` if there is none."""
    if fmt.nvfp4:
        return "NVFP4"
    if fmt.kind != "int" or fmt.bits not in (4, 8) or (fmt.bits == 8 and not fmt.symmetric):
        raise UserError(
            "GGUF holds integer weights of 4 bits, symmetric ones of 8, and NVFP4; use rtn, awq, gptq, gptq-plus, "
            "w8a16, or nvfp4 with options.mixed=false and options.activations=16"
        )
    if fmt.group > 0 and fmt.group % BLOCK:
        raise UserError(f"GGUF has a scale for each {BLOCK} weights; use a group size that {BLOCK} divides, or -1")
    return "Q8_0" if fmt.bits == 8 else "Q4_0" if fmt.symmetric else "Q4_1"


def row_bytes(fmt: Format, columns: int) -> int:
    """Bytes of a row of `columns` weights. Raises ValueError if it does not consist of whole blocks."""
    kind = block_type(fmt)
    fmt.n_groups(columns)
    if columns % block_size(kind):
        raise ValueError(f"{columns} inputs are not whole blocks of {block_size(kind)}, which GGUF needs")
    return columns // block_size(kind) * BYTES[kind]


def pack(qt: QTensor) -> Tensor:
    """The bytes of a matrix, uint8 `[out, row_bytes]`.

    Raises:
        UserError: float16 cannot represent a scale, or represents a minimum too coarsely.
    """
    kind, (rows, columns) = block_type(qt.format), qt.q.shape
    if kind == "NVFP4":
        codes = pack_fp4(qt.q)  # two neighbours in a byte; ggml has the one eight further on in the upper half
        codes = torch.stack((codes & 15, codes >> 4), -1).view(rows, -1, 2, 8)
        halves = (codes[:, :, 0] | codes[:, :, 1] << 4).view(rows, -1, FP4_BLOCK // 2)
        scales = qt.scale.view(torch.uint8).view(rows, -1, 4)  # of four blocks of 16 together, before their codes
        return torch.cat([scales, halves], -1).view(rows, -1)
    blocks = columns // BLOCK
    head = [_per_block(to_float16(qt.scale, "GGUF"), rows, blocks)]
    if kind == "Q4_1":
        assert qt.zero_point is not None
        # m = -s (z + 8), the weight of the lowest code, rounded to float16; exact in float64.
        exact = -qt.scale.double() * (qt.zero_point.double() + 8)
        minimum = exact.to(torch.float16)
        error = ((minimum.double() - exact).abs() / qt.scale.double()).max().item()
        if not error < MOST:
            raise UserError(
                f"a minimum (scale times zero point) rounded to GGUF's 16-bit float is {error:.2g} of a step off, more than "
                f"{MOST}; use symmetric weights"
            )
        head.append(_per_block(minimum, rows, blocks))
    packed = torch.empty(rows, blocks, BYTES[kind], dtype=torch.uint8, device=qt.q.device)
    for place, values in enumerate(head):
        packed[:, :, 2 * place : 2 * place + 2] = values.contiguous().view(torch.uint8).view(rows, blocks, 2)
    codes, start = qt.q.contiguous(), 2 * len(head)
    for part in parts(codes, rows, columns):
        if kind == "Q8_0":
            packed[part, :, start:] = codes[part].view(torch.uint8).view(-1, blocks, BLOCK)
            continue
        # Weight i of a block in the lower half of byte i, weight i + 16 in the upper one. Sixteen codes move as one number.
        halves = codes[part].view(torch.complex128).view(-1, 2)
        low, high = (halves[:, half].contiguous().view(torch.uint8) for half in (0, 1))
        low &= 15
        high <<= 4
        low |= high
        low ^= 0x88  # adds 8 to both, modulo 16
        packed[part, :, start:] = low.view(-1, blocks, BLOCK // 2)
    return packed.view(rows, -1)


def matrix_scale(qt: QTensor) -> Tensor:
    """The number, float32 `[1]`, by which ggml multiplies the product with a matrix of NVFP4."""
    assert qt.global_scale is not None
    return 1 / qt.global_scale.float().view(1)


def in_order(packed: Tensor, columns: Sequence[int] | None, kind: str) -> Tensor:
    """Reorder the columns of packed bytes `[rows, row_bytes]`; None keeps the order.

    Raises:
        UserError: the new order would split blocks.
    """
    if columns is None:
        return packed
    size = block_size(kind)
    order = torch.tensor(columns).view(-1, size)
    if not torch.equal(order, order[:, :1] // size * size + torch.arange(size)):
        raise UserError(f"llama.cpp's order of columns splits blocks of {size}; add the layer to the recipe's skip")
    return packed.view(len(packed), -1, BYTES[kind])[:, order[:, 0] // size].reshape(packed.shape)


def _per_block(values: Tensor, rows: int, blocks: int) -> Tensor:
    """Repeat values of groups `[rows, groups]`, or of the whole matrix `[1]`, for each block: `[rows, blocks]`."""
    values = values.view(-1, values.shape[-1]).expand(rows, -1)
    return values.repeat_interleave(blocks // values.shape[1], 1)
