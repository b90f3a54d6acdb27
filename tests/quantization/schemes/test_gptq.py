"""GPTQ against optimal brain quantization done the slow way, and against llm-compressor's implementation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.quant_data import inputs, output_error, slow_gptq, statistics, weight
from vlmcompress.numerics import Format, round_to_nearest
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.quantization.schemes import gptq, rtn


@pytest.mark.parametrize("actorder", ["static", None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 16), (2, 64), (8, 64)])
def test_is_optimal_brain_quantization(bits, group, symmetric, actorder):
    """Oracle: the slow loop above. Codes may differ only where a value sits on a rounding boundary in float32."""
    x, w = inputs(64, tokens=300), weight(20, 64)
    stats = statistics(x)
    options = gptq.Options(bits=bits, group_size=group, symmetric=symmetric, actorder=actorder)
    fast = gptq.SCHEME.quantize(w, stats, options, torch.bfloat16).dequantize(torch.float32).double()
    slow = slow_gptq(w, stats.gram(), Format("int", bits, group, symmetric), 0.01, actorder)
    rows_alike = torch.isclose(fast, slow, atol=1e-6).all(1)
    assert rows_alike.double().mean() >= 0.9
    assert output_error(x, fast, w) == pytest.approx(output_error(x, slow, w), rel=0.02)


@pytest.mark.parametrize("actorder", ["static", None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(96, 256), (32, 384)])
def test_no_worse_than_llmcompressor(rows, width, symmetric, actorder):
    """Oracle: llm-compressor's quantize_weight with the same Hessian, scales and damping; at most 1% more output error."""
    theirs = pytest.importorskip("llmcompressor.modifiers.gptq.gptq_quantize")
    from compressed_tensors.quantization import QuantizationArgs

    x, w = inputs(width, tokens=2000), weight(rows, width)
    stats = statistics(x)
    ours = gptq.SCHEME.quantize(w, stats, gptq.Options(symmetric=symmetric, actorder=actorder), torch.float32)
    zero = torch.zeros_like(ours.scale, dtype=torch.int8) if symmetric else ours.zero_point
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=128, symmetric=symmetric, actorder=actorder)
    gram = stats.gram()[None].clone()
    theirs_quantized, _, _ = theirs.quantize_weight(w[None].clone(), gram, ours.scale[None], zero[None], None, args)
    assert output_error(x, ours.dequantize(torch.float32), w) <= 1.01 * output_error(x, theirs_quantized[0], w)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([2, 3, 4, 8]), symmetric=st.booleans())
def test_beats_rounding_to_nearest(seed, bits, symmetric):
    """On correlated inputs, feeding errors forward pays, at any width."""
    x, w = inputs(96, seed=seed), weight(24, 96, seed)
    stats = statistics(x)
    kind = {"bits": bits, "group_size": 32, "symmetric": symmetric}
    fed = gptq.SCHEME.quantize(w, stats, gptq.Options(**kind), torch.bfloat16).dequantize(torch.float32)
    plain = rtn.SCHEME.quantize(w, None, rtn.Options(**kind), torch.bfloat16).dequantize(torch.float32)
    assert output_error(x, fed, w) < output_error(x, plain, w)


def test_uncorrelated_inputs_leave_nothing_to_feed_back():
    """With a diagonal Gram matrix GPTQ is rounding to nearest, with scales chosen by the error that the diagonal weighs."""
    collector = Collector(64)
    collector.add(torch.diag(torch.rand(64) + 0.5))
    stats = collector.finish()
    w = weight(20, 64)
    fed = gptq.SCHEME.quantize(w, stats, gptq.Options(group_size=32), torch.bfloat16)
    plain = round_to_nearest(w, Format("int", 4, 32), scale_dtype=torch.bfloat16, importance=stats.importance())
    assert torch.equal(fed.q, plain.q) and torch.equal(fed.scale, plain.scale)


def test_shared_factor_changes_nothing():
    """`prepare` once for a group, or once for each weight: the same codes."""
    stats, options = statistics(inputs(128)), gptq.Options(group_size=32)
    weights = [weight(16, 128, seed) for seed in range(3)]
    shared = gptq.SCHEME.prepare(weights, stats, options)
    for w in weights:
        alone = gptq.SCHEME.quantize(w, stats, options, torch.bfloat16)
        assert torch.equal(alone.q, gptq.SCHEME.quantize(w, stats, options, torch.bfloat16, shared).q)


def test_fewer_tokens_than_features():
    """A singular Gram matrix (8 tokens, 128 features) is damped until it can be factorized."""
    x, w = inputs(128, tokens=8), weight(16, 128)
    for damp in (1e-12, 0.01):
        q = gptq.SCHEME.quantize(w, statistics(x), gptq.Options(group_size=32, damp=damp), torch.bfloat16)
        plain = rtn.SCHEME.quantize(w, None, rtn.Options(group_size=32), torch.bfloat16)
        assert output_error(x, q.dequantize(torch.float32), w) < output_error(x, plain.dequantize(torch.float32), w)


@pytest.mark.parametrize("symmetric", [True, False])
def test_dead_inputs_widen_no_range(symmetric):
    """Large weights on inputs that are always zero leave the others' codes as they are."""
    x, w = inputs(96), weight(24, 96)
    x[:, 7::32] = 0
    large = w.clone()
    large[:, 7::32] *= 30
    options = gptq.Options(group_size=32, symmetric=symmetric)
    quantized, expected = (gptq.SCHEME.quantize(each, statistics(x), options, torch.bfloat16) for each in (large, w))
    live = x.any(0)
    assert torch.equal(quantized.scale, expected.scale) and torch.equal(quantized.q[:, live], expected.q[:, live])
