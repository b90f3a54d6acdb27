"""The schemes mxfp4, mxfp8 and w4a8-fp8, which share their roundings with nvfp4 (`test_nvfp4.py`)."""

from __future__ import annotations

import pytest
import torch

from tests.kit.quant_data import inputs, output_error, slow_gptq, statistics, weight
from vlmcompress.numerics import FLOAT8, MXFP4, MXFP8
from vlmcompress.quantization.schemes import mxfp4, mxfp8, smooth, solve, w4a8_fp8


def effective(method, w: torch.Tensor, x: torch.Tensor, **options) -> torch.Tensor:
    """The weight that one layer has in effect, smoothing undone."""
    chosen, stats = method.OPTIONS(**options), statistics(x)
    smoothing = smooth(method, [w], stats, chosen)
    s = smoothing.scale
    if s is not None:
        w, stats = w * s, stats.rescaled(s)
    (quantized,) = solve(method, [w], stats, chosen, torch.bfloat16, smoothing.factorization).weights
    return quantized.dequantize(torch.float32) / (1 if s is None else s)


PLAIN = {"smooth": "off", "clip": False, "sweeps": 0}


@pytest.mark.parametrize(("method", "fmt"), [(mxfp4.SCHEME, MXFP4), (mxfp8.SCHEME, MXFP8)])
def test_gptq_is_optimal_brain_quantization(method, fmt):
    """Oracle: a slow loop on the same grid. Codes may differ only where a value sits on a rounding boundary in float32."""
    x, w = inputs(64, tokens=300), weight(20, 64)
    fast = effective(method, w, x, rounding="gptq", **PLAIN).double()
    slow = slow_gptq(w, statistics(x).gram(), fmt, 0.01, True)
    assert torch.isclose(fast, slow, atol=1e-6).all(1).double().mean() >= 0.9
    assert output_error(x, fast, w) == pytest.approx(output_error(x, slow, w), rel=0.02)


@pytest.mark.parametrize("method", [mxfp4.SCHEME, mxfp8.SCHEME, w4a8_fp8.SCHEME])
def test_every_way_of_rounding_beats_nearest(method):
    """Of the output, from the activations; and the steps around feedback beat it alone."""
    x, w = inputs(256, tokens=2000), weight(96, 256)
    error = {rounding: output_error(x, effective(method, w, x, rounding=rounding), w) for rounding in ("rtn", "awq")}
    error["gptq"] = output_error(x, effective(method, w, x, rounding="gptq", **PLAIN), w)
    error["all"] = output_error(x, effective(method, w, x, rounding="gptq", smooth="feedback", sweeps=1), w)
    assert max(error["gptq"], error["awq"]) < 0.95 * error["rtn"] and error["all"] < error["gptq"]


@pytest.mark.parametrize("rounding", ["rtn", "gptq", "awq"])
def test_scales_survive_vllms_conversion(rounding):
    """Oracle: vLLM's `convert_bf16_scales_to_fp8`, restated. What it computes with is within 0.4% of what is written."""
    x, w = inputs(512, tokens=900), weight(64, 512) * torch.logspace(-2, 0, 64)[:, None]
    (written,) = solve(w4a8_fp8.SCHEME, [w], statistics(x), w4a8_fp8.Options(rounding=rounding), torch.bfloat16).weights
    scale = written.scale.float()
    of_row = scale.amax(1, keepdim=True) / 448  # `QuantFP8` by token
    kernel = ((scale / of_row).to(FLOAT8).float() / 8).to(FLOAT8).float() * (of_row * 8)
    assert written.scale.dtype is torch.bfloat16 and ((kernel - scale).abs() <= 0.004 * scale).all()


def test_needed_statistics_and_refused_options():
    assert (
        w4a8_fp8.SCHEME.needs(w4a8_fp8.Options(rounding="rtn")).statistics
        == set()
        == mxfp8.SCHEME.needs(mxfp8.Options()).statistics
    )
    assert w4a8_fp8.SCHEME.needs(w4a8_fp8.Options()).statistics == {"gram", "absmean"}
    assert mxfp4.SCHEME.needs(mxfp4.Options()).statistics == {"gram", "absmean"}
    for method, fields, message in (
        (mxfp4.SCHEME, {"activations": 5}, "activations must be 4 or 16"),
        (w4a8_fp8.SCHEME, {"rounding": "awq", "sweeps": 1}, "sweeps are for rounding 'gptq'"),
    ):
        with pytest.raises(ValueError, match=message):
            method.OPTIONS(**fields)
