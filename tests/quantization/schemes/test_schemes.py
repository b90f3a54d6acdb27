"""What every scheme of the folder must do, whoever wrote it: a new file is picked up here by itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kit.quant_data import inputs, output_error, statistics, weight
from vlmcompress.numerics import Scheme
from vlmcompress.numerics.statistics.inputs import STATISTICS
from vlmcompress.quantization.schemes import REGISTRY, Quantizer, QuantizerOptions, smooth, solve

WIDTH = 256
SCHEMES = REGISTRY.names()
QUANTIZING = [name for name in SCHEMES if (m := REGISTRY.get(name)).scheme(m.OPTIONS()) is not None]


def run(name: str, *, dtype: torch.dtype = torch.float32, scale_dtype: torch.dtype = torch.bfloat16):
    """Smooth and solve a group of two layers. Returns their effective weights (smoothing undone), and the solution."""
    method = REGISTRY.get(name)
    options = method.OPTIONS()
    weights = [weight(48, WIDTH, 0).to(dtype), weight(32, WIDTH, 1).to(dtype)]
    stats = statistics(inputs(WIDTH)) if method.needs(options).statistics else None
    smoothing = smooth(method, weights, stats, options, scale_dtype)
    s = smoothing.scale
    if s is not None:
        assert s.shape == (WIDTH,) and (s > 0).all() and s.isfinite().all()
        weights, stats = [w.float() * s for w in weights], stats.rescaled(s)
    solution = solve(method, weights, stats, options, scale_dtype, smoothing.factorization)
    effective = [q.dequantize(torch.float32) / (1 if s is None else s) for q in solution.weights]
    return effective, solution


def test_names():
    assert {"rtn", "gptq", "awq", "fp8", "fp8-static", "int8", "w8a16", "none"} <= set(SCHEMES)
    none = REGISTRY.get("none")
    assert none.scheme(none.OPTIONS()) is None


@pytest.mark.parametrize("name", SCHEMES)
def test_declares_itself(name):
    method = REGISTRY.get(name)
    assert type(method).__doc__ and method.needs(method.OPTIONS()).statistics <= STATISTICS
    assert dataclasses.is_dataclass(method.OPTIONS) and method.OPTIONS.__doc__
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.OPTIONS().bits = 2
    assert isinstance(method.scheme(method.OPTIONS()), Scheme | None)
    assert isinstance(method, Quantizer)


@pytest.mark.parametrize(
    ("name", "options", "searched"),
    [
        ("awq", {}, False),
        ("mbq", {}, True),
        ("mbq", {"objective": "gram"}, False),
        ("mbq", {"activations": 8}, True),
        ("rtn", {}, False),
    ],
)
def test_scales_that_the_model_is_run_for(name, options, searched):
    method = REGISTRY.get(name)
    needs = method.needs(method.OPTIONS(**options))
    assert needs.block_scales is searched and bool(needs.statistics) == (name != "rtn")


@pytest.mark.parametrize("name", SCHEMES)
def test_options_declare_what_they_need(name):
    options = REGISTRY.get(name).OPTIONS()
    assert isinstance(options, QuantizerOptions)
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    assert options.bits == fields.get("bits")
    assert options.balance == ("mbq" if name == "mbq" else fields.get("balance"))
    assert dataclasses.asdict(options) == fields


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", QUANTIZING)
def test_shapes_and_dtypes(name, scale_dtype):
    method = REGISTRY.get(name)
    fmt = method.scheme(method.OPTIONS()).weights
    _, solution = run(name, scale_dtype=scale_dtype)
    for q, rows in zip(solution.weights, (48, 32), strict=True):
        assert q.format == fmt
        assert q.q.shape == (rows, WIDTH) and q.q.dtype is fmt.dtype and q.q.is_contiguous()
        assert q.scale.shape == ((1,) if fmt.group == 0 else (-(-rows // fmt.rows), fmt.n_groups(WIDTH)))
        stored = torch.float8_e4m3fn if fmt.nvfp4 else torch.uint8 if fmt.mx else scale_dtype
        assert q.scale.dtype is stored
        assert (q.global_scale is not None) == fmt.nvfp4
        assert (q.zero_point is None) == fmt.symmetric
        if q.zero_point is not None:
            assert q.zero_point.shape == q.scale.shape and q.zero_point.dtype is torch.int8
        assert q.dequantize().dtype is torch.bfloat16
    activations = method.scheme(method.OPTIONS()).activations
    calibrated = activations is not None and activations.calibrated
    assert (solution.input_scale is not None) == calibrated
    if calibrated:
        assert solution.input_scale.shape == (1,) and solution.input_scale.dtype is torch.float32


@pytest.mark.parametrize("name", QUANTIZING)
def test_output_is_close(name):
    """Oracle: the layer's output computed from activations. 8 bits stay within 0.1% of its energy, 4 bits within 2%."""
    x = inputs(WIDTH)
    effective, solution = run(name)
    limit = 1e-3 if solution.weights[0].format.bits == 8 else 0.02
    for new, seed, rows in zip(effective, (0, 1), (48, 32), strict=True):
        w = weight(rows, WIDTH, seed)
        assert output_error(x, new, w) <= limit * (x @ w.T).square().sum()


@pytest.mark.parametrize("name", QUANTIZING)
def test_deterministic_and_pure(name):
    """Twice the same call, the same bits; inputs untouched."""
    first, second = run(name)[1], run(name)[1]
    for a, b in zip(first.weights, second.weights, strict=True):
        assert torch.equal(a.q.float(), b.q.float()) and torch.equal(a.step, b.step)
    method = REGISTRY.get(name)
    w, stats = weight(48, WIDTH), statistics(inputs(WIDTH))
    before = stats.gram(), stats.absmax(), w.clone()
    smooth(method, [w], stats, method.OPTIONS())
    solve(method, [w], stats, method.OPTIONS(), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(before, (stats.gram(), stats.absmax(), w), strict=True))


@pytest.mark.parametrize("name", QUANTIZING)
def test_dtype_of_the_weight_does_not_matter(name):
    """A bfloat16 weight and the same values in float32 give the same codes."""
    method = REGISTRY.get(name)
    w = weight(48, WIDTH).bfloat16()
    stats = statistics(inputs(WIDTH)) if method.needs(method.OPTIONS()).statistics else None
    narrow = solve(method, [w], stats, method.OPTIONS(), torch.bfloat16).weights[0]
    wide = solve(method, [w.float()], stats, method.OPTIONS(), torch.bfloat16).weights[0]
    assert torch.equal(narrow.q.float(), wide.q.float()) and torch.equal(narrow.step, wide.step)


@pytest.mark.parametrize("name", QUANTIZING)
def test_dead_inputs_and_zero_weights(name):
    """Channels that were never active, an all-zero layer: finite results, and a zero weight stays zero."""
    method = REGISTRY.get(name)
    x = inputs(WIDTH)
    x[:, ::5] = 0
    weights = [weight(48, WIDTH), torch.zeros(16, WIDTH)]
    stats = statistics(x)
    smoothing = smooth(method, weights, stats, method.OPTIONS())
    s = smoothing.scale
    if s is not None:
        assert (s > 0).all() and s.isfinite().all()
        weights, stats = [w * s for w in weights], stats.rescaled(s)
    solution = solve(method, weights, stats, method.OPTIONS(), torch.bfloat16, smoothing.factorization)
    assert solution.weights[0].dequantize(torch.float32).isfinite().all()
    assert (solution.weights[1].dequantize(torch.float32) == 0).all()
    silent = solve(method, weights, statistics(torch.zeros(8, WIDTH)), method.OPTIONS(), torch.bfloat16)
    assert silent.weights[0].dequantize(torch.float32).isfinite().all()


@pytest.mark.parametrize("name", QUANTIZING)
def test_nan_weight_is_refused(name):
    method = REGISTRY.get(name)
    w = weight(48, WIDTH)
    w[1, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN or Inf"):
        solve(method, [w], statistics(inputs(WIDTH)), method.OPTIONS(), torch.bfloat16)


@pytest.mark.parametrize("name", [n for n in QUANTIZING if hasattr(REGISTRY.get(n).OPTIONS, "group_size")])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_group_sizes(name, group_size):
    method = REGISTRY.get(name)
    options = method.OPTIONS(group_size=group_size)
    q = solve(method, [weight(48, WIDTH)], statistics(inputs(WIDTH)), options, torch.bfloat16).weights[0]
    assert q.scale.shape == (48, 1 if group_size == -1 else WIDTH // group_size)
    with pytest.raises(ValueError, match="group size 96 does not divide 256"):
        odd = method.OPTIONS(group_size=96)
        solve(method, [weight(48, WIDTH)], statistics(inputs(WIDTH)), odd, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rtn", {"bits": 5.0}, "bits must be a whole number from 2 to 8"),
        ("rtn", {"group_size": 0}, "group_size must be a positive number or -1"),
        ("w8a16", {"group_size": -7}, "group_size must be positive"),
        ("gptq", {"bits": 16}, "bits must be"),
        ("gptq", {"damp": 0}, "damp must be a number above 0"),
        ("gptq", {"damp": "a bit"}, "damp must be a number above 0"),
        ("gptq", {"actorder": "group"}, "actorder must be 'static' or null"),
        ("awq", {"symmetric": 1}, "symmetric must be true or false"),
        ("awq", {"grid": 2}, "grid must be a whole number of at least 3"),
        ("awq", {"clip": "yes"}, "clip must be true or false"),
        ("mbq", {"objective": "mse"}, "objective must be 'gram' or 'mae'"),
        ("int8", {"alpha": 1.5}, "alpha must be a number from 0 to 1"),
        ("int8", {"alpha": True}, "alpha must be a number from 0 to 1"),
        ("fp8-static", {"weights": "group"}, "weights must be 'tensor' or 'channel'"),
    ],
)
def test_bad_options_name_a_remedy(name, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        REGISTRY.get(name).OPTIONS(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gptq", "awq", "mbq"])
def test_broken_statistics_are_refused(name):
    """By all methods alike: none continues as if there were no error."""
    method = REGISTRY.get(name)
    stats, weights = statistics(inputs(WIDTH)), [weight(16, WIDTH)]
    stats._pending["vision"][3, 3] = float("nan")
    with pytest.raises(ValueError, match="calibration statistics hold NaN or Inf; collect them again"):
        smooth(method, weights, stats, method.OPTIONS())
        solve(method, weights, stats, method.OPTIONS(), torch.bfloat16)
