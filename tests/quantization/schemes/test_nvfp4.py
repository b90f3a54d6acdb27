"""The scheme nvfp4: which groups get it, what layers share, and its roundings against slow ones."""

from __future__ import annotations

import pytest
import torch

from tests.kit.quant_data import inputs, output_error, slow_gptq, statistics, weight
from vlmcompress.numerics import NVFP4, find_global_scale, round_to_nearest
from vlmcompress.quantization.schemes import nvfp4, smooth, solve

PURE = {"mixed": False}


def effective(w: torch.Tensor, x: torch.Tensor, **options) -> torch.Tensor:
    """The weight that one layer has in effect, smoothing undone."""
    chosen, stats = nvfp4.Options(**PURE, **options), statistics(x)
    smoothing = smooth(nvfp4.SCHEME, [w], stats, chosen)
    s = smoothing.scale
    if s is not None:
        w, stats = w * s, stats.rescaled(s)
    (quantized,) = solve(nvfp4.SCHEME, [w], stats, chosen, torch.bfloat16, smoothing.factorization).weights
    return quantized.dequantize(torch.float32) / (1 if s is None else s)


@pytest.mark.parametrize(
    ("layers", "last", "fp8"), [(64, None, 8), (28, None, 4), (4, None, 1), (10, 3, 3), (10, 0, 0)]
)
def test_mixed_gives_nvfp4_to_mlps_but_the_last(layers, last, fp8):
    options = nvfp4.Options(last=last)
    for layer in range(layers):
        chosen = {
            name: nvfp4.SCHEME.other(name, layer, layers, options)
            for name in ("qkv", "o", "conv_in", "gate_up", "down")
        }
        assert chosen.pop("qkv") == chosen.pop("o") == chosen.pop("conv_in") == ("fp8", {})
        assert set(map(str, chosen.values())) == {str(("fp8", {})) if layer >= layers - fp8 else "None"}
    assert nvfp4.SCHEME.other("qkv", 0, layers, nvfp4.Options(**PURE)) is None


@pytest.mark.parametrize("rounding", ["rtn", "gptq", "awq"])
def test_a_group_shares_one_global_scale(rounding):
    """It is that of all weights as one matrix, although one layer is ten times smaller."""
    x, weights = inputs(128), [weight(24, 128), 0.1 * weight(40, 128, 1)]
    stats = statistics(x)
    quantized = solve(nvfp4.SCHEME, weights, stats, nvfp4.Options(rounding=rounding), torch.bfloat16).weights
    assert all(torch.equal(q.global_scale, find_global_scale([torch.cat(weights)])) for q in quantized)
    for q, w in zip(quantized, weights, strict=True):
        assert output_error(x, q.dequantize(torch.float32), w) < 0.02 * (x @ w.T).square().sum()


def test_rtn_is_rounding_to_nearest():
    w, x = weight(24, 128), inputs(128)
    for options, max_code in (({}, None), ({"four_over_six": False}, 6.0)):
        expected = round_to_nearest(w, NVFP4, max_code=max_code).dequantize(torch.float32)
        assert torch.equal(effective(w, x, rounding="rtn", **options), expected)


def test_gptq_is_optimal_brain_quantization():
    """Oracle: a slow loop on the same grid. Codes may differ only where a value sits on a rounding boundary in float32."""
    x, w = inputs(64, tokens=300), weight(20, 64)
    fast, slow = effective(w, x, rounding="gptq").double(), slow_gptq(w, statistics(x).gram(), NVFP4, 0.01, True)
    assert torch.isclose(fast, slow, atol=1e-6).all(1).double().mean() >= 0.9
    assert output_error(x, fast, w) == pytest.approx(output_error(x, slow, w), rel=0.02)


def test_every_step_lowers_the_error():
    """Of the output, from the activations: two scales to choose from, error feedback, searched scales and clipping."""
    x, w = inputs(256, tokens=2000), weight(96, 256)
    error = {
        (rounding, both): output_error(x, effective(w, x, rounding=rounding, four_over_six=both), w)
        for rounding in ("rtn", "gptq", "awq")
        for both in (False, True)
    }
    assert all(error[rounding, True] < error[rounding, False] for rounding in ("rtn", "gptq", "awq"))
    assert max(error["gptq", True], error["awq", True]) < 0.9 * error["rtn", True]


def test_the_steps_around_feedback_lower_the_error():
    """AWQ's scales first, searched block scales, local search after: each, and all together more than any."""
    x, w = inputs(256, tokens=2000), weight(96, 256)
    steps = {"plain": {}, "smooth": {"smooth": "awq"}, "clip": {"clip": True}, "sweeps": {"sweeps": 1}}
    steps["all"] = {"smooth": "awq", "clip": True, "sweeps": 1}
    error = {name: output_error(x, effective(w, x, rounding="gptq", **step), w) for name, step in steps.items()}
    assert max(error["smooth"], error["clip"], error["sweeps"]) < 0.98 * error["plain"]
    assert error["all"] < min(error["smooth"], error["clip"], error["sweeps"])
    assert nvfp4.SCHEME.needs(nvfp4.Options(smooth="awq")).statistics == {"gram", "absmean", "absmax"}


def test_the_sketch_predicts_feedback():
    x, w = inputs(256, tokens=2000), weight(96, 256)
    options, stats = nvfp4.Options(**PURE), statistics(x)
    real = nvfp4.SCHEME.quantize(w, stats, options, torch.bfloat16).dequantize(torch.float32)
    guess = w + nvfp4.SCHEME.sketch(w, stats, options, torch.bfloat16)
    assert output_error(x, guess, w) == pytest.approx(output_error(x, real, w), rel=0.3)


def test_the_input_scale_covers_every_modality():
    """The largest input of all, whatever the balance, over the smoothing scale."""
    x, s = inputs(128), torch.linspace(0.5, 2, 128)
    stats, options = statistics(x).rescaled(s), nvfp4.Options(balance={"text": 1.0, "vision": 0.0, "answer": 0.0})
    (scale,) = {float(solve(nvfp4.SCHEME, [weight(24, 128)], stats, options, torch.bfloat16).input_scale)}
    assert scale == pytest.approx(448 * 6 / float((x / s).abs().max()), rel=1e-5)
    assert nvfp4.SCHEME.input_scale(stats, nvfp4.Options(activations=16)) is None


def test_statistics_that_are_read_depend_on_the_options():
    read = {
        (a, r): set(nvfp4.SCHEME.needs(nvfp4.Options(activations=a, rounding=r)).statistics)
        for a in (4, 16)
        for r in ("rtn", "gptq", "awq")
    }
    assert read[16, "rtn"] == set() and read[4, "rtn"] == {"absmax"}
    assert read[4, "gptq"] == {"gram", "absmax"} and read[16, "awq"] == {"gram", "absmean"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activations": 8}, "activations must be 4 or 16"),
        ({"rounding": "gptqq"}, "rounding must be"),
        ({"last": -1}, "last must be"),
        ({"last": 2, "mixed": False}, "last applies to mixed"),
        ({"mixed": "yes"}, "mixed must be"),
        ({"damp": 0.0}, "damp must be"),
        ({"sweeps": -1}, "sweeps must be"),
        ({"rounding": "awq", "clip": True}, "are for rounding 'gptq'"),
        ({"four_over_six": 1}, "four_over_six must be"),
    ],
)
def test_bad_options(fields, message):
    with pytest.raises(ValueError, match=message):
        nvfp4.Options(**fields)
