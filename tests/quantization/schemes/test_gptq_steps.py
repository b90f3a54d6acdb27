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
    find_global_scale,
    find_params,
    find_ranges,
    round_to_nearest,
    scale_from_range,
)
from vlmcompress.quantization.schemes import _ranges, awq, gptq, gptq_plus, smooth, solve
from vlmcompress.quantization.schemes._columns import quantize_columns
from vlmcompress.quantization.schemes._local_search import STRIP, search


def grid(fmt: Format) -> torch.Tensor:
    """All codes."""
    if fmt.nvfp4:
        positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        return torch.cat([-positive.flip(0)[:-1], positive])
    return torch.arange(fmt.qmin, fmt.qmax + 1, dtype=torch.float64)


FORMATS = [Format("int", 4, 16), Format("int", 3, 24, symmetric=False), Format("int", 2, -1), NVFP4]
WIDTH, FIRST, END = 48, 10, 42  # columns, and those of the block that is searched


class Block:
    """A block of columns in the middle of a weight's, as GPTQ's visit leaves it, everything in the order of visits."""

    def __init__(self, fmt: Format, seed: int = 0, rows: int = 12):
        w, stats = weight(rows, WIDTH, seed), statistics(inputs(WIDTH, tokens=100, seed=seed))
        shared = find_global_scale([w]) if fmt.nvfp4 else None
        scale, zero = find_params(w, fmt, scale_dtype=torch.bfloat16, global_scale=shared)
        feedback = gptq.SCHEME.prepare([w], stats, gptq.Options(group_size=16))
        (quantized,) = quantize_columns([w], feedback, [(scale, zero)], fmt, global_scale=shared)
        order, places = feedback.order, feedback.order // (WIDTH // scale.shape[1])
        self.h, self.fmt = stats.gram().double()[order][:, order], fmt
        self.h.diagonal().add_(0.01 * self.h.diagonal().mean())
        self.codes = quantized.q.float().T[order].contiguous()
        self.steps = scale.float().T[places]
        self.zeros = torch.zeros_like(self.steps) if zero is None else zero.float().T[places]
        self.weight = w.T[order]
        errors = self.errors(self.codes)
        lower = feedback.matrix.tril(-1) + torch.eye(WIDTH)
        z, part = lower @ errors, slice(FIRST, END)
        self.arguments = (z[part], feedback.matrix[part, part], feedback.pivots[part], self.steps[part], fmt)

    def errors(self, codes: torch.Tensor) -> torch.Tensor:
        """Of all columns, `[columns, out]`."""
        return self.weight - (codes - self.zeros) * self.steps

    def left(self, codes: torch.Tensor) -> torch.Tensor:
        """Oracle, float64 `[out]`: the output error that is left where the columns after the block take whatever values suit
        the errors of all columns before best, by least squares."""
        d = self.errors(codes).double()[:END]
        fixed, cross, free = self.h[:END, :END], self.h[:END, END:], self.h[END:, END:]
        return ((fixed - cross @ torch.linalg.solve(free, cross.T)) @ d * d).sum(0)

    def searched(self, sweeps: int) -> torch.Tensor:
        """All codes after a search in the block."""
        codes, errors = self.codes.clone(), self.errors(self.codes)
        search(codes[FIRST:END], errors[FIRST:END], *self.arguments, sweeps)
        torch.testing.assert_close(errors, self.errors(codes), rtol=0, atol=1e-5)
        return codes


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_of_a_strip_the_best_single_code_changes(fmt):
    """Oracle: of all codes of all columns of a strip, tried one by one in float64, the one that leaves least. A row may differ
    only where two leave the same in float32."""
    block = Block(fmt)
    codes = block.codes.clone()
    for first in [*range(FIRST, END, STRIP)] * 2:
        tried = [codes]
        for column, code in itertools.product(range(first, min(first + STRIP, END)), grid(fmt).float()):
            tried.append(codes.clone())
            tried[-1][column] = code
        best = torch.stack([block.left(each) for each in tried]).argmin(0)
        codes = torch.stack(tried)[best, :, torch.arange(codes.shape[1])].T
    assert (codes != block.codes).any(0).double().mean() > 0.3
    assert (block.searched(2) == codes).all(0).double().mean() >= 0.8


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), fmt=st.sampled_from(FORMATS))
def test_the_remaining_error_never_rises(seed, fmt):
    """Of no row, from one sweep to the next, until no single code of the block is better."""
    block = Block(fmt, seed, rows=10)
    left = [block.left(block.searched(sweeps)) for sweeps in range(4)]
    for before, after in itertools.pairwise(left):
        assert (after <= before * (1 + 1e-5) + 1e-9).all()
    ended = block.searched(40)
    least = block.left(ended)
    for column, code in itertools.product(range(FIRST, END), grid(fmt).float()):
        other = ended.clone()
        other[column] = code
        assert (block.left(other) >= least * (1 - 1e-4)).all()


@pytest.mark.parametrize("fmt", [Format("int", 3, 16), Format("int", 3, 16, symmetric=False), NVFP4], ids=str)
def test_searched_ranges_are_the_best_of_those_tried(fmt):
    """Oracle: each share by itself, for each row and group: the best of every third, and then of those next to it. No piece is
    worse than with its plain range, and all together they are as good as the best of all shares."""
    w, v = weight(12, 64), torch.rand(64)
    kwargs = {"scale_dtype": torch.bfloat16, "global_scale": find_global_scale([w]) if fmt.nvfp4 else None}
    scale, zero = _ranges.ranges_of_least_error(w, v, fmt, 20, **kwargs)
    low, high = find_ranges(w, fmt)

    def counted(scale, zero):
        d = gap(w, scale, zero, fmt)
        return (d.square() * v).view(*scale.shape, -1).sum(-1)

    shares = torch.linspace(1.2 if fmt.symmetric else 1.0, 0.4, 20)
    step = shares[0] - shares[1]
    outside = (shares[0] + step, shares[-1] - step)
    tried = [
        counted(*scale_from_range(w, low * r, high * r, fmt, max_code=fmt.max_codes[0], **kwargs))
        for r in (outside[0], *shares, outside[1])
    ]
    plain, tried = counted(*find_params(w, fmt, importance=v, **kwargs)), torch.stack(tried)
    third = 1 if fmt.nvfp4 else 3
    first = tried[1:-1:third].argmin(0) * third + 1
    stays = plain <= tried.gather(0, first[None])[0]  # near 1: such a piece tries what is next to that
    next_to = torch.stack([tried.gather(0, (first + k)[None])[0] for k in (-1, 0, 1)]).amin(0)
    left = counted(scale, zero)
    assert torch.allclose(left[~stays], next_to[~stays])
    assert (left <= plain).all() and (left < 0.99 * plain).any()
    assert left.sum() < 1.01 * torch.minimum(tried[1:-1].amin(0), plain).sum()


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
    feedback = gptq.SCHEME.prepare([weight(4, 24)], stats, gptq.Options(group_size=24))
    h = stats.gram().double()
    h[7, 7] = h.diagonal()[h.diagonal() > 0].mean()
    h.diagonal().add_(0.01 * h.diagonal().mean())
    order = feedback.order.tolist()
    for i, column in enumerate(order):
        later = order[i + 1 :]
        cross = h[column, later]
        left = h[column, column] - (cross @ torch.linalg.solve(h[later][:, later], cross) if later else 0)
        expected = 0 if column == 7 else float(left)
        assert float(feedback.residual_weight[column]) == pytest.approx(expected, rel=1e-3)


def rounded(method, w, stats, options):
    """What a method makes of `w [out, in]`, as the inputs before smoothing meet it, and whether it smooths."""
    smoothing = smooth(method, [w], stats, options)
    s = smoothing.scale
    by = torch.ones(w.shape[1]) if s is None else s
    q = solve(method, [w * by], stats.rescaled(by), options, torch.bfloat16, smoothing.factorization).weights[0]
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
        result, smoothed = rounded(gptq.SCHEME, w, stats, options)
        assert smoothed == ("smooth" in step)
        left[name] = output_error(x, result, w)
    whole, plain = left.pop("all"), left.pop("plain")
    assert whole < min(left.values())
    assert left.pop("sweeps") < plain and max(left.values()) < 0.95 * plain


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_plus_is_gptq_with_all_steps(bits):
    """The same codes, and on tokens that it has not seen less error than either method in the same format."""
    x, w = inputs(128, tokens=4000), weight(64, 128)
    stats, left = statistics(x[:2000]), {}
    fields = {"bits": bits, "group_size": 32, "symmetric": False}
    every = gptq.Options(**fields, smooth="feedback", clip=True, sweeps=4 if bits == 2 else 2)
    plus = gptq_plus.Options(bits=bits, group_size=32)
    for name, method, options in (
        ("plus", gptq_plus.SCHEME, plus),
        ("steps", gptq.SCHEME, every),
        ("gptq", gptq.SCHEME, gptq.Options(**fields)),
        ("awq", awq.SCHEME, awq.Options(**fields)),
    ):
        left[name] = output_error(x[2000:], rounded(method, w, stats, options)[0], w)
    assert gptq_plus.SCHEME.needs(plus).statistics == {"gram", "absmean"} and left["plus"] == left["steps"]
    assert left["plus"] < 0.9 * min(left["gptq"], left["awq"])


def test_smoothing_is_that_of_awq():
    """With the same format and statistics, weighed by the same balance."""
    stats, w = statistics(inputs(128)), [weight(24, 128)]
    for balance in ("off", "ratio"):
        chain = gptq.Options(group_size=32, smooth="awq", balance=balance)
        theirs = awq.Options(group_size=32, symmetric=True, balance=balance)
        assert torch.equal(smooth(gptq.SCHEME, w, stats, chain).scale, smooth(awq.SCHEME, w, stats, theirs).scale)
    for chosen, statistics_read in {
        "feedback": {"gram", "absmean"},
        "awq": {"gram", "absmean"},
        False: {"gram"},
    }.items():
        assert gptq.SCHEME.needs(gptq.Options(smooth=chosen)).statistics == statistics_read


def damped(stats, by, damp):
    """The matrix of the inputs, damped as those divided by `by [in]` are, and the order of visits of these: float64."""
    gram = stats.gram().double() / torch.outer(by, by).double()
    dead = gram.diagonal() == 0
    gram.diagonal()[dead] = gram.diagonal()[~dead].mean()
    order = gram.diagonal().argsort(descending=True, stable=True)
    gram.diagonal().add_(damp * gram.diagonal().mean())
    return gram * torch.outer(by, by), order


def upper(h):
    """R, upper triangular, with h = R R^T."""
    return torch.linalg.cholesky(h.flip(0, 1)).flip(0, 1)


def test_smoothing_for_feedback_takes_what_feedback_leaves_least_of():
    """Oracle: for each of AWQ's scales the factor of the smoothed inputs' matrix, whose diagonal weighs rounding errors."""
    stats, weights = statistics(inputs(96, tokens=600)), [weight(24, 96), weight(16, 96, 1)]
    options, fmt = gptq.Options(bits=3, group_size=32, smooth="feedback"), Format("int", 3, 32)
    scales = awq.candidates(weights, stats, awq.Options(bits=3, group_size=32, symmetric=True))
    gram, order = damped(stats, scales[19 + 9], 0.01)  # the middle of the family with weights
    left = []
    for s in (torch.ones(96), *scales):
        h = (gram / torch.outer(s, s).double())[order][:, order]
        v = torch.empty(96)
        v[order] = upper(h).diagonal().square().float()
        rounded = [round_to_nearest(w * s, fmt, scale_dtype=torch.bfloat16, max_code=3.5) for w in weights]
        errors = [q.dequantize(torch.float32) - w * s for q, w in zip(rounded, weights, strict=True)]
        left.append(sum(float((e.square() * v).sum()) for e in errors))
    scale = smooth(gptq.SCHEME, weights, stats, options).scale
    best = min(range(len(left)), key=left.__getitem__)
    assert best and torch.equal(scale, scales[best - 1])


@pytest.mark.parametrize("earlier", [False, True])
def test_rounding_continues_from_the_factor_of_the_search(earlier):
    """Oracle: a factorization of the smoothed inputs' matrix, damped as that of inputs divided by the middle candidate; also
    where the statistics were divided before. Without a search before it, `prepare` factorizes the matrix as it is."""
    x, w = inputs(48, tokens=300), weight(8, 48)
    x[:, 7] = 0
    stats, options = statistics(x), gptq.Options(group_size=16, smooth="feedback", damp=0.05)
    if earlier:
        stats = stats.rescaled(torch.rand(48) + 0.5)
    middle = awq.candidates([w], stats, awq.Options(bits=4, group_size=16, symmetric=True))[19 + 9]
    smoothing = smooth(gptq.SCHEME, [w], stats, options)
    s = smoothing.scale
    feedback = gptq.SCHEME.prepare([w * s], stats.rescaled(s), options, smoothing.factorization)
    for result, by in ((feedback, middle), (gptq.SCHEME.prepare([w * s], stats.rescaled(s), options), s)):
        gram, order = damped(stats, by, 0.05)
        assert torch.equal(result.order, order)
        factor = upper((gram / torch.outer(s, s).double())[order][:, order])
        torch.testing.assert_close(result.matrix.double().tril(), (factor / factor.diagonal()).T, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(result.pivots.double(), factor.diagonal(), rtol=1e-3, atol=0)
        expected = factor.diagonal().square().where(order != 7, 0)
        torch.testing.assert_close(result.residual_weight[order].double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("fields", [{"smooth": "yes"}, {"clip": 1}, {"sweeps": -1}])
def test_bad_steps(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"^{name} must be"):
        gptq.Options(**fields)
