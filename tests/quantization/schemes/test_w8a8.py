"""The 8-bit schemes with quantized activations: SmoothQuant's scales, and the static scales of FP8."""

from __future__ import annotations

import pytest
import torch

from tests.kit.quant_data import inputs, output_error, statistics, weight
from vlmcompress.numerics import find_params, round_to_nearest
from vlmcompress.quantization.schemes import fp8_static, int8, rtn, smooth, solve, w8a16


def simulate_w8a8(x, w, s):
    """Output of an INT8 layer as an engine computes it: weights per row, activations per token, after smoothing by `s`."""
    q = round_to_nearest(w * s, int8.SCHEME.scheme(int8.Options()).weights, scale_dtype=torch.bfloat16)
    return in_engine(x / s, q.dequantize(torch.float32))


def in_engine(x, w):
    """Output of a layer whose smoothed inputs are rounded to 8 bits per token."""
    step = x.abs().amax(1, keepdim=True) / 127
    return (x / step).round() * step @ w.T


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_smoothing_scale(alpha):
    """Oracle: eq. 4 of the paper, channel by channel."""
    x, weights = inputs(32), [weight(8, 32, 0), weight(12, 32, 1)]
    s = smooth(int8.SCHEME, weights, statistics(x), int8.Options(alpha=alpha)).scale
    for j in range(32):
        largest = max(float(w[:, j].abs().max()) for w in weights)
        assert float(s[j]) == pytest.approx(float(x[:, j].abs().max()) ** alpha / largest ** (1 - alpha), rel=1e-4)


def test_balanced_at_one_half():
    """At alpha = 0.5 input and weight of every channel end up with the same largest value."""
    x, w = inputs(32), weight(8, 32)
    s = smooth(int8.SCHEME, [w], statistics(x), int8.Options()).scale
    torch.testing.assert_close((x / s).abs().amax(0), (w * s).abs().amax(0))


def test_smoothing_lowers_the_error_of_outlier_activations():
    """Oracle: a simulated W8A8 layer. Channels 50 times larger than the rest are what the method is for."""
    x, w = torch.randn(400, 128), weight(64, 128)
    x[:, :3] *= 50
    s = smooth(int8.SCHEME, [w], statistics(x), int8.Options()).scale
    exact = x @ w.T
    plain = (simulate_w8a8(x, w, torch.ones(128)) - exact).square().sum()
    smoothed = (simulate_w8a8(x, w, s) - exact).square().sum()
    assert smoothed < 0.2 * plain


def test_silent_channels_keep_their_scale():
    """A channel that is never active must not be blown up for the day it is."""
    x, w = inputs(32), weight(8, 32)
    x[:, 3], w[:, 5] = 0, 0
    x[:, 6], w[:, 6] = 0, 0
    s = smooth(int8.SCHEME, [w], statistics(x), int8.Options()).scale
    assert s[3] == 1 and s[6] == 1 and s.isfinite().all()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_inputs_that_no_weight_reads_set_no_scale(alpha):
    """Oracle: the simulated layer without the channel, however large its input is."""
    x, w = inputs(64), weight(16, 64)
    x[:, 5] *= 1e4
    w[:, 5] = 0
    s = smooth(int8.SCHEME, [w], statistics(x), int8.Options(alpha=alpha)).scale
    kept = torch.arange(64) != 5
    exact = x @ w.T
    whole = (simulate_w8a8(x, w, s) - exact).square().sum() / exact.square().sum()
    without = (simulate_w8a8(x[:, kept], w[:, kept], s[kept]) - exact).square().sum() / exact.square().sum()
    assert whole == pytest.approx(float(without), rel=1e-3) and whole < 1e-3


def test_rounding_against_the_papers():
    """Oracle: scales of `max|row| / 127`, on tokens that no statistics saw. Columns and inputs are uneven; in none of forty
    cases are ours worse by over 2%, and they are better as a whole."""
    options, ratios = int8.Options(), []
    for seed in range(40):
        width = (64, 128, 256, 512)[seed % 4]
        x, w = inputs(width, 800, seed), weight((16, 64)[seed % 2], width, seed)
        w *= torch.exp(0.5 * (seed % 5) * torch.randn(width, generator=torch.Generator().manual_seed(seed)))
        stats = statistics(x[:400])
        s = smooth(int8.SCHEME, [w], stats, options).scale
        (ours,) = solve(int8.SCHEME, [w * s], stats.rescaled(s), options, torch.bfloat16).weights
        step = ((w * s).abs().amax(1, keepdim=True) / 127).bfloat16().float()
        papers = (w * s / step).round().clamp(-128, 127) * step
        exact, x = x[400:] @ w.T, x[400:] / s
        loss, papers_loss = ((in_engine(x, q) - exact).square().sum() for q in (ours.dequantize(torch.float32), papers))
        ratios.append(loss / papers_loss)
    assert max(ratios) < 1.02 and torch.stack(ratios).log().mean().exp() < 0.99


def test_weights_of_silent_inputs_are_not_cut():
    """As one is never active, it has no effect on the row's scale, but may become active."""
    x, w = inputs(32), weight(8, 32)
    x[:, 3], w[:, 3] = 0, 3.0
    (q,) = solve(int8.SCHEME, [w], statistics(x), int8.Options(), torch.bfloat16).weights
    torch.testing.assert_close(q.dequantize(torch.float32)[:, 3], w[:, 3], rtol=1e-2, atol=0)


def test_input_scale_maps_the_largest_input_to_448():
    x = inputs(64)
    scale = fp8_static.SCHEME.input_scale(statistics(x), fp8_static.Options())
    torch.testing.assert_close(x.abs().max() / scale, torch.tensor([448.0]))
    assert fp8_static.SCHEME.input_scale(statistics(torch.zeros(4, 64)), fp8_static.Options()) == 1


def test_layers_that_an_engine_fuses_share_a_weight_scale():
    """vLLM rounds fused shards again to their largest scale; with one scale there is nothing to round again."""
    weights = [weight(16, 64), 3 * weight(16, 64, 1), 0.1 * weight(16, 64, 2)]
    solution = solve(fp8_static.SCHEME, weights, statistics(inputs(64)), fp8_static.Options(), torch.float32)
    scales = torch.cat([q.scale for q in solution.weights])
    torch.testing.assert_close(scales, (weights[1].abs().max() / 448).expand(3))
    again = solve(
        fp8_static.SCHEME, weights, statistics(inputs(64)), fp8_static.Options(weights="channel"), torch.float32
    )
    torch.testing.assert_close(again.weights[0].scale, weights[0].abs().amax(1, keepdim=True) / 448)


@pytest.mark.parametrize("group_size", [-1, 64])
def test_w8a16_is_eight_bit_rounding(group_size):
    """Oracle: rtn at 8 bits; and far below 4 bits' error."""
    w = weight(16, 128)
    q = w8a16.SCHEME.quantize(w, None, w8a16.Options(group_size=group_size), torch.bfloat16)
    same = rtn.SCHEME.quantize(w, None, rtn.Options(bits=8, group_size=group_size), torch.bfloat16)
    assert torch.equal(q.q, same.q)
    coarse = rtn.SCHEME.quantize(w, None, rtn.Options(group_size=group_size), torch.bfloat16)
    x = inputs(128)
    eight, four = (output_error(x, t.dequantize(torch.float32), w) for t in (q, coarse))
    assert eight < 0.01 * four


def test_fp8_scale_is_per_row():
    """Oracle: max|row| / 448."""
    w = weight(16, 64)
    fmt = fp8_static.SCHEME.scheme(fp8_static.Options(weights="channel")).weights
    torch.testing.assert_close(find_params(w, fmt)[0], w.abs().amax(1, keepdim=True) / 448)
