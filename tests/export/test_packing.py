"""Codes packed into words are compressed-tensors' own, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from vlmcompress.export.packing import pack_bits, pack_words, unpack_words

SHAPES = ((4, 32), (5, 40), (3, 33), (7, 1))
MANY = (2, 1 << 19)  # more than what is worked on at a time


@pytest.mark.parametrize(
    ("bits", "shape"), [*itertools.product(range(1, 9), SHAPES), (3, MANY), (4, MANY)]
)  # codes of 3 bits cross from word to word
def test_words_are_those_of_compressed_tensors(bits, shape):
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, dtype=torch.int8)
    words = pack_words(codes, bits)
    assert torch.equal(words, pack_to_int32(codes, bits)) and words.is_contiguous()
    assert torch.equal(unpack_words(words, bits, shape[1]), codes)
    columns = pack_to_int32(codes, bits, packed_dim=0)
    assert torch.equal(pack_words(codes.T, bits).T, columns)
    assert torch.equal(unpack_words(columns.T, bits, shape[0]).T, unpack_from_int32(columns, bits, codes.shape, 0))


def test_signed_codes_are_their_lowest_bits():
    codes = torch.tensor([-8, 7, -1], dtype=torch.int8)
    assert pack_bits(codes, 4, signed=True).tolist() == [0x78, 0x0F] and pack_bits(codes, 4).tolist() == [0xF0, 0x07]
    assert pack_bits(codes, 8, signed=True).tolist() == [248, 7, 255]
