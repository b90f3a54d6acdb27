"""AWQ's search on Gram statistics, against the same search done on the activations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.quant_data import inputs, output_error, statistics, weight
from vlmcompress.numerics import fake_quantize, find_ranges, round_to_nearest, scale_from_range
from vlmcompress.quantization.schemes import awq, rtn, solve


def rounded(w, fmt, scale_dtype, importance, ratio=1.0):
    low, high = (ratio * end for end in find_ranges(w, fmt, importance))
    return fake_quantize(w, *scale_from_range(w, low, high, fmt, scale_dtype=scale_dtype, importance=importance), fmt)


def effective(weights, stats, options, scale_dtype=torch.bfloat16):
    """What the layers compute after AWQ, as weights for the unscaled input."""
    s = awq.SCHEME.smooth(weights, stats, options, scale_dtype).scale
    s = torch.ones(weights[0].shape[1]) if s is None else s
    solution = solve(awq.SCHEME, [w * s for w in weights], stats.rescaled(s), options, scale_dtype)
    return [q.dequantize(torch.float32) / s for q in solution.weights]


@pytest.mark.parametrize("symmetric", [True, False])
def test_search_matches_brute_force(symmetric):
    """Oracle: the output error of every candidate from the activations in float64, over all layers of the group."""
    x = inputs(128, tokens=400)
    weights = [weight(40, 128, 0), weight(24, 128, 1)]
    stats, options = statistics(x), awq.Options(group_size=32, symmetric=symmetric)
    fmt = awq.SCHEME.scheme(options).weights
    scales = [torch.ones(128), *awq.candidates(weights, stats, options)]
    assert len(scales) == 1 + (options.grid - 1) * 2
    counts = stats.gram().diagonal()
    losses = [
        sum(output_error(x, rounded(w * s, fmt, torch.bfloat16, counts / s.square()) / s, w) for w in weights)
        for s in scales
    ]
    best = min(range(len(scales)), key=losses.__getitem__)
    scale = awq.SCHEME.smooth(weights, stats, options).scale
    assert best > 0, "the test needs inputs on which scaling pays"
    torch.testing.assert_close(scale, scales[best])


def test_a_sample_of_rows_chooses_as_well_as_all():
    """On a group of six times as many rows as are looked at, the loss of the choice over all rows is nearly the least."""
    x = inputs(128, tokens=400)
    weights = [weight(900, 128, 0), weight(600, 128, 1)]
    stats, options = statistics(x), awq.Options(group_size=32)
    assert 250 <= sum(map(len, awq.sample(weights))) <= 260
    fmt, gram = awq.SCHEME.scheme(options).weights, stats.gram()
    scales = torch.stack([torch.ones(128), *awq.candidates(weights, stats, options)])
    losses = awq._losses(torch.cat(weights), scales, gram, fmt, torch.bfloat16)
    scale = awq.SCHEME.smooth(weights, stats, options).scale
    chosen = next(i for i, s in enumerate(scales) if torch.equal(s, scale))
    assert losses[chosen] <= 1.02 * min(losses) < 0.9 * losses[0]


def test_candidates_match_llmcompressor():
    """Oracle: llm-compressor's formula (transform/awq/base.py, _compute_best_scale), written out from its source."""
    x, w = inputs(128), weight(40, 128)
    options = awq.Options(group_size=32, grid=5)
    relative = (w.abs().view(-1, 32) / (w.abs().view(-1, 32).amax(1, keepdim=True) + 1e-6)).view_as(w).mean(0)
    x_mean = x.abs().mean(0)
    candidates = awq.candidates([w], statistics(x), options)
    for ratio, candidate in zip((0, 1 / 3, 2 / 3, 1), candidates[4:], strict=True):
        s = (x_mean.pow(ratio) / (relative.pow(1 - ratio) + 1e-4)).clamp(min=1e-4)
        torch.testing.assert_close(candidate, s / (s.max() * s.min()).sqrt())
    for ratio, candidate in zip((1 / 4, 2 / 4, 3 / 4, 1), candidates[:4], strict=True):  # and without duo scaling
        s = x_mean.pow(ratio).clamp(min=1e-4)
        torch.testing.assert_close(candidate, s / (s.max() * s.min()).sqrt())


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([3, 4]), symmetric=st.booleans(), clip=st.booleans())
def test_never_worse_than_rounding_to_nearest(seed, bits, symmetric, clip):
    """On the objective it minimizes, with and without clipping."""
    x = inputs(64, tokens=200, seed=seed)
    weights = [weight(16, 64, seed), weight(24, 64, seed + 1)]
    kind = {"bits": bits, "group_size": 32, "symmetric": symmetric}
    effective_weights = effective(weights, statistics(x), awq.Options(**kind, clip=clip))
    stats, plain_options = statistics(x), rtn.Options(**kind)
    plain = [rtn.SCHEME.quantize(w, stats, plain_options, torch.bfloat16).dequantize(torch.float32) for w in weights]
    ours = sum(output_error(x, new, w) for new, w in zip(effective_weights, weights, strict=True))
    theirs = sum(output_error(x, new, w) for new, w in zip(plain, weights, strict=True))
    assert ours <= theirs * (1 + 1e-4)


def test_clip_search_matches_brute_force():
    """Oracle: for each row and group, the output error of that group's columns alone, from the activations."""
    x, w = inputs(96, tokens=300), weight(12, 96)
    fmt, steps = awq.SCHEME.scheme(awq.Options(group_size=32, symmetric=True)).weights, 10
    gram = statistics(x).gram()
    chosen = awq._best_ratio(w, find_ranges(w, fmt, gram.diagonal()), gram, fmt, {"scale_dtype": torch.bfloat16})
    ratios = [1 - k * 0.5 / steps for k in range(steps)]
    for g in range(3):
        columns = slice(32 * g, 32 * g + 32)
        errors = []
        for ratio in ratios:
            d = (rounded(w, fmt, torch.bfloat16, statistics(x).gram().diagonal(), ratio) - w)[:, columns]
            errors.append((x[:, columns].double() @ d.double().T).square().sum(0))
        expected = torch.tensor([ratios[k] for k in torch.stack(errors).argmin(0)])
        torch.testing.assert_close(chosen[:, g], expected)


@pytest.mark.parametrize("bits", [3, 4])
def test_clipping_helps_each_row(bits):
    """Clipping is kept row by row only where the whole row's error falls, so it can't hurt any row."""
    x, w = inputs(128), weight(40, 128)
    stats = statistics(x)
    options = awq.Options(bits=bits, group_size=32)
    fmt = awq.SCHEME.scheme(options).weights
    clipped = awq.SCHEME.quantize(w, stats, options, torch.bfloat16).dequantize(torch.float32)
    plain = round_to_nearest(w, fmt, scale_dtype=torch.bfloat16).dequantize(torch.float32)
    rows = [((x @ (new - w).T).square().sum(0)) for new in (clipped, plain)]
    assert (rows[0] <= rows[1] * (1 + 1e-4)).all()
    assert rows[0].sum() < 0.97 * rows[1].sum()


def test_uniform_inputs_are_left_alone_or_improved():
    """Equal channels and 8 bits leave nothing to gain; the result must not be worse than doing nothing."""
    x, w = torch.randn(300, 64), weight(16, 64)
    stats, options = statistics(x), awq.Options(bits=8, group_size=32, clip=False)
    plain = rtn.SCHEME.quantize(w, None, rtn.Options(bits=8, group_size=32, symmetric=False), torch.bfloat16)
    effective_weight = effective([w], stats, options)[0]
    assert output_error(x, effective_weight, w) <= output_error(x, plain.dequantize(torch.float32), w) * (1 + 1e-4)
