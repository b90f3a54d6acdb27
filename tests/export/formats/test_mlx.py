"""MLX's format against a slow packer and, where it is installed, against MLX itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from vlmcompress.export.formats import mlx
from vlmcompress.numerics import MXFP4, MXFP8, NVFP4, ActFormat, Format, QTensor, Scheme, round_to_nearest
from vlmcompress.utils.errors import UserError

AFFINE = [Format("int", *case) for case in product((2, 3, 4, 5, 6, 8), (32, 64, 128), (True, False))]
FORMATS = [*AFFINE, Format("int", 4, 256), MXFP4, MXFP8, NVFP4]
ROWS, COLUMNS = 8, 512


def quantized(fmt: Format, dtype: torch.dtype = torch.bfloat16) -> QTensor:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[5] = 0
    return round_to_nearest(weight, fmt, scale_dtype=dtype)


def wide(qt: QTensor) -> QTensor:
    """The matrix with its scales in float32, in which their products with zero points are exact."""
    return replace(qt, scale=qt.scale.float()) if qt.format.kind == "int" else qt


@pytest.mark.parametrize("fmt", AFFINE, ids=str)
def test_affine_codes_are_a_stream_of_bits(fmt):
    """Oracle: the bits of each row written out one by one, and MLX's formula in float64."""
    qt = wide(quantized(fmt))
    stored = mlx.tensors(qt, Scheme(fmt))
    groups = COLUMNS // fmt.group
    for row in range(ROWS):
        number = sum(int(word) << (32 * at) for at, word in enumerate(stored["weight"][row].to(torch.int64)))
        codes = [number >> (at * fmt.bits) & (1 << fmt.bits) - 1 for at in range(COLUMNS)]
        scale, bias = stored["scales"][row].double(), stored["biases"][row].double()
        weights = torch.tensor(codes).view(groups, -1) * scale[:, None] + bias[:, None]
        assert torch.equal(weights.float().flatten(), qt.dequantize(torch.float32)[row])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_mlx_reads_the_same_weights(fmt):
    """Oracle: `mx.dequantize` in float32."""
    mx = pytest.importorskip("mlx.core")
    scheme, qt = Scheme(fmt), wide(quantized(fmt))
    stored = {name: mx.array(tensor.numpy()) for name, tensor in mlx.tensors(qt, scheme).items()}
    numbers = mlx.numbers(scheme)
    weight = mx.dequantize(stored["weight"], stored["scales"], stored.get("biases"), **numbers, dtype=mx.float32)
    weight, expected = torch.from_dlpack(weight), qt.dequantize(torch.float32)
    if fmt.nvfp4:  # mlx-vlm divides the layer's output, not the scales
        assert torch.allclose(weight / stored["weight_global_scale"].item(), expected, rtol=1e-6, atol=0)
    else:
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_without_zero_points_are_exact(dtype):
    for bits in (2, 3, 4, 5, 6, 8):
        qt = quantized(Format("int", bits, 64), dtype)
        stored = mlx.tensors(qt, Scheme(qt.format))
        assert stored["biases"].dtype == dtype
        assert torch.equal(stored["biases"].double(), -(2.0 ** (bits - 1)) * qt.scale.double())


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme(Format("int", 7, 64)), "MLX has integers of 2, 3, 4, 5, 6 and 8 bits, not of 7"),
        (Scheme(Format("int", 4, 16)), "MLX has a scale for each 32, 64 or 128 inputs, not for group_size 16"),
        (Scheme(Format("int", 4, -1)), "not for group_size -1"),
        (Scheme(Format("float", 8, -1)), "no kernel for FP8 with a scale per row, block or matrix; use mxfp8"),
        (Scheme(NVFP4, ActFormat("float", 4, dynamic=True)), "no settings of activations; use a weight-only scheme"),
    ],
)
def test_what_mlx_lacks(scheme, message):
    with pytest.raises(UserError, match=message):
        mlx.storage(scheme)
