"""The quantization arithmetic, against compressed-tensors' own and against properties any rounding has."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmcompress.numerics import (
    FLOAT8,
    NVFP4,
    ActFormat,
    Format,
    dequantize,
    fake_quantize,
    find_params,
    round_to_nearest,
    weight_codes,
    weight_only,
)
from vlmcompress.numerics._rounding import widened

INT4 = Format("int", 4, 32)
FORMATS = [
    Format(kind, bits, group, symmetric)
    for kind, bits, symmetric in [
        *(("int", bits, symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)),
        ("float", 8, True),
    ]
    for group in (32 if kind == "int" else 16, -1, 0)  # floats in groups of 32 are microscaling's: `test_mx`
]
SCALES = (torch.float32, torch.bfloat16, torch.float16)


def weights(rows: int = 24, columns: int = 128, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    return (w + 0.3 * torch.randn(rows, 1, generator=generator)).to(dtype)


def compressed_tensors_args(fmt: Format):
    """The same format in compressed-tensors' words."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    strategy = {0: "tensor", -1: "channel"}.get(fmt.group, "group")
    return quantization.QuantizationArgs(
        num_bits=fmt.bits,
        type=fmt.kind,
        strategy=strategy,
        group_size=fmt.group if fmt.group > 0 else None,
        symmetric=fmt.symmetric,
    )


def test_float8_are_widened():
    """Oracle: torch, for each pair of bytes, NaN among them; an odd number, an odd place, and rows that are not neighbours."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(FLOAT8).view(256, 512)
    for codes in (every, every[:3, :5], every[::2], every[0, :1], every.view(-1)[1:257]):
        out = torch.empty(codes.shape)
        assert torch.equal(widened(codes, out=out).view(torch.int32), codes.float().view(torch.int32))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_parameters_match_compressed_tensors(fmt):
    """Oracle: calculate_qparams of compressed-tensors on the same minima and maxima."""
    args = compressed_tensors_args(fmt)
    from compressed_tensors.quantization.utils import calculate_qparams

    w = weights()
    pieces = w.reshape(1, -1) if fmt.group == 0 else w.unflatten(1, (fmt.n_groups(128), -1))
    theirs, their_zero = calculate_qparams(pieces.amin(-1), pieces.amax(-1), args)
    scale, zero = find_params(w, fmt, max_code=fmt.qmax + 0.5 if fmt.kind == "int" else None)
    torch.testing.assert_close(scale, theirs, rtol=1e-6, atol=0)
    if fmt.symmetric:
        assert zero is None
    else:
        assert zero.dtype is torch.int8
        torch.testing.assert_close(zero, their_zero)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_rounding_matches_compressed_tensors(fmt):
    """Oracle: fake_quantize and quantize of compressed-tensors with the same scale and zero point."""
    args = compressed_tensors_args(fmt)
    from compressed_tensors.quantization.lifecycle import forward

    w = weights()
    for scale_dtype in SCALES:
        scale, zero = find_params(w, fmt, scale_dtype=scale_dtype)
        codes = forward.quantize(w, scale, zero, args, dtype=fmt.dtype)
        q = weight_codes(w, scale, zero, fmt)
        assert q.dtype is codes.dtype
        assert torch.equal(q.float(), codes.float()), scale_dtype
        theirs = forward.fake_quantize(w, scale.float(), zero, args)
        torch.testing.assert_close(fake_quantize(w, scale, zero, fmt), theirs.float(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.kind == "int" and f.group], ids=str)
def test_packed_by_compressed_tensors_is_unchanged(fmt):
    """Oracle: their pack-quantized compressor, fed our dequantized weight, stores our codes: the two conventions agree."""
    args = compressed_tensors_args(fmt)
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationScheme

    qt = round_to_nearest(weights(), fmt)
    state = {"weight": qt.dequantize(torch.float32), "weight_scale": qt.scale}
    if qt.zero_point is not None:
        state["weight_zero_point"] = qt.zero_point
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    packed = PackedQuantizationCompressor.compress(state, scheme)
    assert torch.equal(unpack_from_int32(packed["weight_packed"], fmt.bits, qt.q.shape), qt.q)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_rounding_again_changes_nothing(fmt):
    """With its parameters kept, a rounded weight is a fixed point; codes stay inside the format's range."""
    w = weights()
    qt = round_to_nearest(w, fmt, scale_dtype=torch.bfloat16)
    assert qt.q.shape == w.shape
    assert qt.q.float().min() >= fmt.qmin and qt.q.float().max() <= fmt.qmax
    again = weight_codes(qt.dequantize(torch.float32), qt.scale, qt.zero_point, fmt)
    assert torch.equal(again.float(), qt.q.float())


@pytest.mark.parametrize(("scale_dtype", "weighted"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.kind == "int" and f.symmetric], ids=str)
def test_each_symmetric_scale_is_the_better_of_two(fmt, scale_dtype, weighted):
    """Oracle: both roundings of each piece, written out, in float64. Over all pieces both occur."""
    w, importance = weights(64), torch.logspace(-2, 2, 128) if weighted else torch.ones(128)
    scale, _ = find_params(w, fmt, scale_dtype=scale_dtype, importance=importance if weighted else None)
    shape = (1, -1) if fmt.group == 0 else (64, fmt.n_groups(128), -1)
    pieces, counts = w.reshape(shape).double(), importance.expand_as(w).reshape(shape).double()
    scales, errors = [], []
    for max_code in (fmt.qmax + 0.5, fmt.qmax):
        scales.append((pieces.abs().amax(-1) / max_code).float().to(scale_dtype))
        s = scales[-1].double().unsqueeze(-1)
        rounded = (pieces / s).round().clamp(fmt.qmin, fmt.qmax) * s
        errors.append(((rounded - pieces).square() * counts).sum(-1))
    clear = (errors[0] - errors[1]).abs() > 1e-5 * errors[0]
    assert clear[scales[0] != scales[1]].double().mean() > 0.9  # in bfloat16 many are the same
    torch.testing.assert_close(scale[clear], torch.where(errors[1] < errors[0], scales[1], scales[0])[clear])
    if fmt.group == 32:
        assert (errors[1] < errors[0]).any() and (errors[0] < errors[1]).any()


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.kind == "int"], ids=str)
def test_columns_of_zero_weight_widen_no_range(fmt):
    """The rest is rounded as if they were zero. Where no column counts, all do."""
    w = weights()
    w[:, 5::32] *= 50
    counts = torch.ones(128)
    counts[5::32] = 0
    rounded, expected = (round_to_nearest(x, fmt, importance=counts) for x in (w, w * counts))
    assert torch.equal(rounded.scale, expected.scale)
    assert torch.equal(rounded.q[:, counts > 0], expected.q[:, counts > 0])
    uninformed = round_to_nearest(w, fmt, importance=torch.zeros(128))
    assert ((uninformed.dequantize(torch.float32) - w).abs() <= 1.001 * uninformed.scale.max()).all()


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32),
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
)
def test_error_is_at_most_one_step(values, bits, symmetric):
    """Anything inside the range moves by at most a step (half, plus half for the clamp and the rounded zero point)."""
    w = torch.tensor([values])
    fmt = Format("int", bits, 32, symmetric)
    qt = round_to_nearest(w, fmt)
    assert ((qt.dequantize(torch.float32) - w).abs() <= qt.scale * 1.001 + 1e-12).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, -1, 0])
def test_error_falls_with_bits(group, symmetric):
    """More bits, less error."""
    w = weights()
    errors = [
        (round_to_nearest(w, Format("int", bits, group, symmetric)).dequantize(torch.float32) - w).square().sum()
        for bits in range(2, 9)
    ]
    assert all(a > b for a, b in zip(errors, errors[1:], strict=False))


def test_error_falls_with_smaller_groups():
    """A scale for fewer columns is a better scale."""
    w = weights(columns=256, seed=3)
    errors = [
        (round_to_nearest(w, Format("int", 4, group)).dequantize(torch.float32) - w).square().sum()
        for group in (0, -1, 128, 64, 32)
    ]
    assert all(a > b for a, b in zip(errors, errors[1:], strict=False))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.group], ids=str)
def test_rows_are_independent(fmt):
    """Quantizing a slice of rows is slicing the quantized rows (not so per matrix, where all share a scale)."""
    w = weights()
    whole, part = round_to_nearest(w, fmt), round_to_nearest(w[5:9], fmt)
    assert torch.equal(whole.q[5:9].float(), part.q.float())
    assert torch.equal(whole.scale[5:9], part.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_is_float32_whatever_the_dtype(dtype):
    """A 16-bit weight and the same values in float32 give the same result."""
    w = weights(dtype=dtype)
    narrow = round_to_nearest(w, INT4, scale_dtype=torch.bfloat16)
    wide = round_to_nearest(w.float(), INT4, scale_dtype=torch.bfloat16)
    assert torch.equal(narrow.q, wide.q) and torch.equal(narrow.scale, wide.scale)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_extreme_values_stay_finite(fmt):
    """All-zero, denormal and enormous groups give finite weights; zero stays exactly zero."""
    for value, scale_dtype in itertools.product((0.0, 1e-45, 1e-39, 1e-12, 3e38), (torch.bfloat16, torch.float16)):
        w = torch.zeros(2, 128)
        w[0, ::3] = value
        qt = round_to_nearest(w, fmt, scale_dtype=scale_dtype)
        back = qt.dequantize(torch.float32)
        assert (qt.scale > 0).all() and qt.scale.isfinite().all(), (value, scale_dtype)
        assert back.isfinite().all(), (value, scale_dtype)
        assert (back[w == 0] == 0).all(), (value, scale_dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", [INT4, Format("float", 8, -1), Format("int", 8, 0)], ids=str)
def test_nan_and_inf_are_refused(bad, fmt):
    w = weights()
    w[3, 7] = bad
    with pytest.raises(ValueError, match="NaN or Inf"):
        find_params(w, fmt)


def test_dequantize_in_bfloat16_is_what_a_kernel_computes():
    """code * scale in bfloat16 (exact operands, one rounding) equals the float32 product rounded to bfloat16."""
    qt = round_to_nearest(weights(), INT4, scale_dtype=torch.bfloat16)
    kernel = (qt.q.to(torch.bfloat16).unflatten(1, (4, 32)) * qt.scale[..., None]).flatten(1)
    assert torch.equal(qt.dequantize(torch.bfloat16), kernel)
    assert torch.equal(dequantize(qt.q, qt.scale, None, INT4).to(torch.bfloat16), kernel)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Format("int", 4, 128).n_groups(3420), "group size 128 does not divide 3420"),
        (lambda: round_to_nearest(torch.ones(2, 48), INT4), "group size 32 does not divide 48"),
        (lambda: Format("int", 9, 128), "bits must be a whole number from 2 to 8"),
        (lambda: Format("int", "4", 128), "bits must be a whole number"),
        (lambda: Format("float", 6, -1), "bits must be 8 or 4"),
        (lambda: Format("float", 4, -1), "a scale for each 16 columns"),
        (lambda: NVFP4.n_groups(40), "the layer.s 40"),
        (lambda: ActFormat("float", 4, dynamic=False), "dynamic scales"),
        (lambda: Format("float", 8, -1, symmetric=False), "symmetric must be true"),
        (lambda: Format("int", 4, -2), "group_size must be positive"),
        (lambda: Format("int", 4, True), "group_size must be positive"),
        (lambda: Format("int", 4, 128, symmetric="yes"), "symmetric must be true or false"),
        (lambda: Format("nf4", 4, 128), "kind must be"),
        (lambda: ActFormat("int", 16, dynamic=True), "bits must be"),
        (lambda: weight_only(4, 0), "group_size must be a positive number or -1"),
    ],
)
def test_bad_formats_name_a_remedy(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_not_finite_is_refused_where_its_input_is_never_active():
    """Such a column widens no range, but its NaN would be written."""
    w, importance = torch.randn(4, 32), torch.ones(32)
    w[1, 3], importance[3] = torch.nan, 0.0
    with pytest.raises(ValueError, match="NaN or Inf"):
        find_params(w, weight_only(4, 16).weights, importance=importance)
