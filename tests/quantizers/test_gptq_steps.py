"""Searched ranges, local search after GPTQ and smoothing before it, each against a slow or an exhaustive version."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.quant_data import inputs, output_error, statistics, weight
from vlmcompress.numerics import (
    NVFP4,
    Format,
    QTensor,
    find_global_scale,
    find_params,
    find_ranges,
    round_to_nearest,
    scale_from_range,
)
from vlmcompress.quantizers import _ranges, awq, gptq, gptq_plus, smooth, solve
from vlmcompress.quantizers._coordinate_descent import descend


def error(q: QTensor, w: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Output error of each row, float64 `[out]`."""
    d = q.dequantize(torch.float32).double() - w.double()
    return (d @ gram.double() * d).sum(1)


def grid(fmt: Format) -> torch.Tensor:
    """All codes."""
    if fmt.nvfp4:
        positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        return torch.cat([-positive.flip(0)[:-1], positive])
    return torch.arange(fmt.qmin, fmt.qmax + 1, dtype=torch.float64)


def slow_descent(w, start, gram, sweeps, refit):
    """Coordinate descent one number at a time, in float64: each scale by least squares over its group, then each code by
    trying all of them."""
    zeros = None if start.zero_point is None else start.zero_point.double()
    rows = [
        slow_row(w[i].double(), start, i, 0 if zeros is None else zeros[i], gram.double(), sweeps, refit)
        for i in range(len(w))
    ]
    return torch.stack(rows)


def slow_row(w, start, row, zeros, gram, sweeps, refit):
    """The values `[in]` that one row ends with."""
    steps, codes, every = start.step[row].double(), start.q[row].double(), grid(start.format)
    size = len(w) // len(steps)
    shift = torch.zeros_like(w) + (zeros if isinstance(zeros, int) else zeros.repeat_interleave(size))

    def error(d):
        return ((d @ gram) * d).sum(-1)

    def left(codes, steps):
        return w - (codes - shift) * steps.repeat_interleave(size)

    for g in range(len(steps)) if refit and sweeps else ():
        c = torch.zeros_like(w)
        c[g * size : (g + 1) * size] = (codes - shift)[g * size : (g + 1) * size]
        if not c.any():
            continue
        new = steps.clone()
        target = steps[g] + c @ gram @ left(codes, steps) / error(c)
        new[g] = as_written(target, start)
        if target > 0 and error(left(codes, new)) < error(left(codes, steps)):
            steps = new
    for column in [*range(len(w))] * sweeps:
        tried = codes.repeat(len(every), 1)
        tried[:, column] = every
        codes[column] = every[error(left(tried, steps)).argmin()]
    return (codes - shift) * steps.repeat_interleave(size)


def as_written(scale: torch.Tensor, quantized: QTensor) -> torch.Tensor:
    """A scale as the format stores it."""
    if quantized.global_scale is None:
        return scale.to(quantized.scale.dtype).double()
    return (scale.float() * quantized.global_scale).to(torch.float8_e4m3fn).float().div(quantized.global_scale).double()


def start(fmt: Format, w: torch.Tensor) -> QTensor:
    return round_to_nearest(w, fmt, scale_dtype=torch.bfloat16)


FORMATS = [
    Format("int", 4, 16),
    Format("int", 3, 24, symmetric=False),
    Format("int", 2, -1),
    NVFP4,
]


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_descent_is_one_number_after_another(fmt, refit):
    """Codes may differ only where a value sits on a rounding boundary in float32."""
    w, stats = weight(12, 48), statistics(inputs(48, tokens=300))
    quantized = start(fmt, w)
    fast = descend(
        [w[:5], w[5:]], [found_rows(quantized, slice(5)), found_rows(quantized, slice(5, 12))], stats.gram(), 2, refit
    )
    fast = torch.cat([q.dequantize(torch.float32) for q in fast]).double()
    slow = slow_descent(w, quantized, stats.gram(), 2, refit)
    assert torch.isclose(fast, slow, atol=1e-6).all(1).double().mean() >= 0.8


def found_rows(q: QTensor, rows: slice) -> QTensor:
    zero = None if q.zero_point is None else q.zero_point[rows]
    return QTensor(q.q[rows], q.scale[rows], zero, q.format, q.global_scale)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), fmt=st.sampled_from(FORMATS + [Format("int", 3, 48)]), refit=st.booleans())
def test_the_error_never_rises(seed, fmt, refit):
    """Of no row, from one sweep to the next, whatever it starts from; and it falls."""
    x = inputs(48, tokens=100, seed=seed)
    x[:, 5] = 0
    w, gram = weight(10, 48, seed), statistics(x).gram()
    quantized = start(fmt, w)
    errors = [error(descend([w], [quantized], gram, sweeps, refit)[0], w, gram) for sweeps in range(4)]
    for before, after in itertools.pairwise(errors):
        assert (after <= before * (1 + 1e-5) + 1e-9).all()
    assert errors[3].sum() < 0.95 * errors[0].sum()


def test_descent_against_all_codes_there_are():
    """Tiny rows, whose best codes a search through all of them finds: from there nothing moves, and from nearest codes the
    search ends at least as low as every neighbour, and often at the best."""
    fmt, width = Format("int", 2, -1), 5
    w, gram = weight(16, width), statistics(inputs(width, tokens=50)).gram()
    quantized = start(fmt, w)
    every = torch.tensor(list(itertools.product(range(-2, 2), repeat=width)), dtype=torch.int8)
    errors = torch.stack(
        [error(QTensor(q.expand(16, -1), quantized.scale, None, fmt), w, gram) for q in every]
    )  # [4^5, 16]
    best = QTensor(every[errors.argmin(0)], quantized.scale, None, fmt)
    assert torch.equal(descend([w], [best], gram, 3, refit=False)[0].q, best.q)
    ended = descend([w], [quantized], gram, 20, refit=False)[0]
    least = error(ended, w, gram)
    for row, q in enumerate(ended.q):
        neighbours = (every != q).sum(1) <= 1
        assert least[row] <= errors[neighbours, row].min() * (1 + 1e-5)
    assert (least <= errors.amin(0) * (1 + 1e-5)).double().mean() > error(quantized, w, gram).le(
        errors.amin(0) * 1.00001
    ).double().mean()


@pytest.mark.parametrize("fmt", [Format("int", 3, 16), Format("int", 3, 16, symmetric=False), NVFP4], ids=str)
def test_searched_ranges_are_the_best_of_those_tried(fmt):
    """Oracle: each share by itself, for each row and group; never worse than the plain range."""
    w, v = weight(12, 64), torch.rand(64)
    kwargs = {"scale_dtype": torch.bfloat16, "global_scale": find_global_scale([w]) if fmt.nvfp4 else None}
    scale, zero = _ranges.least_error(w, v, fmt, 9, **kwargs)
    low, high = find_ranges(w, fmt)
    top = 1.2 if fmt.symmetric else 1.0

    def counted(scale, zero):
        d = gap(w, scale, zero, fmt)
        return (d.square() * v).view(*scale.shape, -1).sum(-1)

    tried = [
        counted(*scale_from_range(w, low * r, high * r, fmt, max_code=fmt.max_codes[0], **kwargs))
        for r in torch.linspace(top, 0.4, 9)
    ]
    plain = counted(*find_params(w, fmt, importance=v, **kwargs))
    assert torch.allclose(counted(scale, zero), torch.stack([plain, *tried]).amin(0))
    assert (counted(scale, zero) < 0.99 * plain).any()


def gap(w, scale, zero, fmt):
    """Errors of rounding to nearest, by trying all codes."""
    spread = scale.double().repeat_interleave(w.shape[1] // scale.shape[1], 1)
    shift = 0 if zero is None else zero.double().repeat_interleave(w.shape[1] // scale.shape[1], 1)
    values = (grid(fmt)[:, None, None] - shift) * spread
    return (values - w.double()).abs().amin(0).float()


def test_residues_are_what_later_columns_leave():
    """Oracle: the Schur complement of a column over all columns after it, of the damped matrix; 0 for a dead input."""
    x = inputs(24, tokens=200)
    x[:, 7] = 0
    stats = statistics(x)
    feedback = gptq.prepare([weight(4, 24)], stats, gptq.Options(group_size=24))
    h = stats.gram().double()
    h[7, 7] = h.diagonal()[h.diagonal() > 0].mean()
    h.diagonal().add_(0.01 * h.diagonal().mean())
    order = feedback.order.tolist()
    for i, column in enumerate(order):
        later = order[i + 1 :]
        cross = h[column, later]
        left = h[column, column] - (cross @ torch.linalg.solve(h[later][:, later], cross) if later else 0)
        expected = 0 if column == 7 else float(left)
        assert float(feedback.residues[column]) == pytest.approx(expected, rel=1e-3)


def rounded(method, w, stats, options):
    """What a method makes of `w [out, in]`, as the inputs before smoothing meet it, and whether it smooths."""
    s = smooth(method, [w], stats, options)
    by = torch.ones(w.shape[1]) if s is None else s
    q = solve(method, [w * by], stats.rescaled(by), options, torch.bfloat16).weights[0]
    return q.dequantize(torch.float32) / by, s is not None


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_step_lowers_the_error(bits, symmetric):
    """Of the layer's output on its tokens: ranges, local search, smoothing; and all of them more than any alone."""
    x, w = inputs(128, tokens=2000), weight(64, 128)
    stats, left = statistics(x), {}
    steps = {"plain": {}, "clip": {"clip": True}, "sweeps": {"sweeps": 2}, "smooth": {"smooth": "awq"}}
    steps["feedback"] = {"smooth": "feedback"}
    steps["all"] = {"clip": True, "sweeps": 2, "smooth": "feedback"}
    for name, step in steps.items():
        options = gptq.Options(bits=bits, group_size=32, symmetric=symmetric, **step)
        made, smoothed = rounded(gptq, w, stats, options)
        assert smoothed == ("smooth" in step)
        left[name] = output_error(x, made, w)
    whole = left.pop("all")
    assert whole < min(left.values())
    assert max(error for name, error in left.items() if name != "plain") < 0.95 * left["plain"]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_plus_is_gptq_with_all_steps(bits):
    """The same codes, and on tokens that it has not seen less error than either method in the same format."""
    x, w = inputs(128, tokens=4000), weight(64, 128)
    stats, left = statistics(x[:2000]), {}
    fields = {"bits": bits, "group_size": 32, "symmetric": False}
    every = gptq.Options(**fields, smooth="feedback", clip=True, sweeps=2, refit=False)
    plus = gptq_plus.Options(bits=bits, group_size=32)
    for name, method, options in (
        ("plus", gptq_plus, plus),
        ("steps", gptq, every),
        ("gptq", gptq, gptq.Options(**fields)),
        ("awq", awq, awq.Options(**fields)),
    ):
        left[name] = output_error(x[2000:], rounded(method, w, stats, options)[0], w)
    assert gptq_plus.needs(plus).statistics == {"gram", "absmean"} and left["plus"] == left["steps"]
    assert left["plus"] < 0.9 * min(left["gptq"], left["awq"])


def test_smoothing_is_that_of_awq():
    """With the same format and statistics, weighed by the same balance."""
    stats, w = statistics(inputs(128)), [weight(24, 128)]
    for balance in ("off", "ratio"):
        chain = gptq.Options(group_size=32, smooth="awq", balance=balance)
        theirs = awq.Options(group_size=32, symmetric=True, balance=balance)
        assert torch.equal(smooth(gptq, w, stats, chain), smooth(awq, w, stats, theirs))
    for chosen, statistics_read in {
        "feedback": {"gram", "absmean"},
        "awq": {"gram", "absmean"},
        False: {"gram"},
    }.items():
        assert gptq.needs(gptq.Options(smooth=chosen)).statistics == statistics_read


def test_smoothing_for_feedback_takes_what_feedback_leaves_least_of():
    """Oracle: for each of AWQ's scales the factor of the smoothed inputs' matrix, whose diagonal weighs rounding errors."""
    stats, weights = statistics(inputs(96, tokens=600)), [weight(24, 96), weight(16, 96, 1)]
    options, fmt = gptq.Options(bits=3, group_size=32, smooth="feedback"), Format("int", 3, 32)
    gram = stats.gram().double()
    root = gram.diagonal().sqrt()
    gram.diagonal().add_(0.01 * root * root.mean())
    order = stats.gram().diagonal().argsort(descending=True, stable=True)
    scales = awq.candidates(weights, stats, awq.Options(bits=3, group_size=32, symmetric=True))
    left = []
    for s in (torch.ones(96), *scales):
        h = (gram / torch.outer(s, s).double())[order][:, order]
        factor = torch.linalg.cholesky(h.flip(0, 1)).flip(0, 1)  # upper triangular R with h = R R^T
        assert torch.allclose(factor @ factor.T, h, rtol=1e-6)
        v = torch.empty(96)
        v[order] = factor.diagonal().square().float()
        rounded = [round_to_nearest(w * s, fmt, scale_dtype=torch.bfloat16, max_code=3.5) for w in weights]
        errors = [q.dequantize(torch.float32) - w * s for q, w in zip(rounded, weights, strict=True)]
        left.append(sum(float((e.square() * v).sum()) for e in errors))
    scale = smooth(gptq, weights, stats, options)
    best = min(range(len(left)), key=left.__getitem__)
    assert best and torch.equal(scale, scales[best - 1])


@pytest.mark.parametrize("earlier", [False, True])
def test_the_factor_of_smoothed_inputs_is_that_of_plain_inputs_rescaled(earlier):
    """Oracle: a factorization of the damped and smoothed matrix; also where the statistics were divided before."""
    x, w = inputs(48, tokens=300), weight(8, 48)
    x[:, 7] = 0
    stats, options = statistics(x), gptq.Options(group_size=16, smooth="feedback", damp=0.05)
    if earlier:
        stats = stats.rescaled(torch.rand(48) + 0.5)
    s = smooth(gptq, [w], stats, options)
    feedback = gptq.prepare([w * s], stats.rescaled(s), options)
    h = stats.unscaled().gram().double()
    h[7, 7] = h.diagonal()[h.diagonal() > 0].mean()
    root = h.diagonal().sqrt()
    h.diagonal().add_(0.05 * root * root.mean())
    by = (s if stats.scale is None else s * stats.scale).double()
    h = (h / torch.outer(by, by))[feedback.order][:, feedback.order]
    factor = torch.linalg.cholesky(h.flip(0, 1)).flip(0, 1)  # upper triangular R with h = R R^T
    ratios = (factor / factor.diagonal()).T
    torch.testing.assert_close(feedback.matrix.double().tril(), ratios, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(feedback.pivots.double(), factor.diagonal(), rtol=1e-3, atol=0)
    again = gptq.prepare([w * s], stats.rescaled(s), options)  # nothing is handed on any more
    assert torch.equal(again.matrix.tril(), feedback.matrix.tril()) and torch.equal(again.residues, feedback.residues)
    expected = factor.diagonal().square().where(feedback.order != 7, 0)
    torch.testing.assert_close(feedback.residues[feedback.order].double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("fields", [{"smooth": "yes"}, {"clip": 1}, {"clip_grid": 2}, {"sweeps": -1}, {"refit": None}])
def test_bad_steps(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"^{name} must be"):
        gptq.Options(**fields)
