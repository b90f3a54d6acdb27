"""MXFP4 and MXFP8 against compressed-tensors' own functions, bit for bit, and against their definition."""

from __future__ import annotations

import pytest
import torch

from vlmcompress.numerics import (
    MXFP4,
    MXFP8,
    ActFormat,
    find_params,
    pack_fp4,
    quantize_with,
    round_activations,
    round_to_nearest,
)

KINDS = {"MXFP4": MXFP4, "MXFP8": MXFP8}


def weights(rows: int = 64, columns: int = 128) -> torch.Tensor:
    """Rows of different size, one so small that few exponents are left, and one with an outlier."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    w[4] *= 1e-30
    w[5, 7] = 40.0
    return w


@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits_as_compressed_tensors(name):
    """Oracle: its scales for each block's maximum, and what its compressor stores of weight and scales."""
    quant_scheme = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme, fmt, w = quant_scheme.preset_name_to_scheme(name, ["Linear"]), KINDS[name], weights()
    blocks = w.unflatten(1, (-1, 32))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    qt = round_to_nearest(w, fmt, max_code=fmt.max_codes[0])
    assert torch.equal(qt.step, scale)
    kind = {"MXFP4": "mxfp4-pack-quantized", "MXFP8": "mxfp8-quantized"}[name]
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress({"weight": w, "weight_scale": scale}, scheme)
    codes, key = (pack_fp4(qt.q), "weight_packed") if name == "MXFP4" else (qt.q, "weight")
    assert torch.equal(codes.view(torch.uint8), stored[key].view(torch.uint8))
    assert qt.scale.dtype is torch.uint8 and torch.equal(qt.scale, stored["weight_scale"])
    back = compressor.decompress(stored, scheme)["weight"]
    assert torch.equal(qt.dequantize(torch.bfloat16).float(), back.bfloat16().float())


@pytest.mark.parametrize("name", KINDS)
def test_scales_are_powers_of_two_and_an_empty_block_stays_finite(name):
    fmt, w = KINDS[name], weights()
    w[3] = 0
    qt = round_to_nearest(w, fmt)
    assert torch.equal(qt.step.log2(), qt.step.log2().round()) and torch.equal(qt.step, find_params(w, fmt)[0])
    assert qt.dequantize(torch.float32).isfinite().all() and not qt.dequantize(torch.float32)[3].any()
    assert torch.equal(quantize_with(w, qt.step, None, fmt).scale, qt.scale)


def test_of_three_powers_of_two_that_of_least_error_is_taken():
    """Oracle: every block by itself, with all exponents there are."""
    w = weights(200, 32).pow(3)  # with tails
    tried = [quantize_with(w, torch.full((200, 1), 2.0**exponent), None, MXFP4) for exponent in range(-126, 20)]
    least = torch.stack([(qt.dequantize(torch.float32) - w).square().sum(1) for qt in tried]).amin(0)
    error = (round_to_nearest(w, MXFP4).dequantize(torch.float32) - w).square().sum(1)
    plain = (round_to_nearest(w, MXFP4, max_code=4.0).dequantize(torch.float32) - w).square().sum(1)
    assert (error <= plain).all() and (error < plain).any()
    torch.testing.assert_close(error, least)


@pytest.mark.parametrize("bits", [4, 8])
def test_activations_are_rounded_token_by_token(bits):
    x = weights(16, 64)
    fmt = {4: MXFP4, 8: MXFP8}[bits]
    expected = torch.cat(
        [round_to_nearest(row[None], fmt, max_code=fmt.max_codes[0]).dequantize(torch.float32) for row in x]
    )
    assert torch.equal(round_activations(x, ActFormat("float", bits, dynamic=True, mx=True)), expected)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="MXFP4 has a scale per 32 inputs, which does not divide the layer.s 48"):
        round_to_nearest(torch.ones(4, 48), MXFP4)
    with pytest.raises(ValueError, match="dynamic scales"):
        ActFormat("float", 8, dynamic=False, mx=True)
