"""Every format against the tools whose it is, and against each other: the same weights, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
from torch import nn

from tests.kit import rtn
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.export import formats
from vlmcompress.export.formats import Reader, Writer, awq, fp8, gptq, modelopt
from vlmcompress.export.layer_targets import describe_layers, misnamed
from vlmcompress.models.layer_names import Kept, Layers
from vlmcompress.numerics import NVFP4, ActFormat, Format, QTensor, Scheme, round_to_nearest
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import FORMATS
from vlmcompress.utils.tensor_headers import Spec

BITS, GROUPS = (2, 3, 4, 8), (-1, 16, 32, 64, 128)
INTS = {
    f"w{bits}-{'symmetric' if symmetric else 'asymmetric'}-{group}": Scheme(Format("int", bits, group, symmetric))
    for bits in BITS
    for symmetric in (True, False)
    for group in GROUPS
}
# Half of them, in which each two of bits, symmetry and size of groups occur together.
PAIRS = {
    key
    for key, scheme in INTS.items()
    if (BITS.index(scheme.weights.bits) + GROUPS.index(scheme.weights.group) + scheme.weights.symmetric) % 2
}
SCHEMES = INTS | {
    "fp8": Scheme(Format("float", 8, -1), ActFormat("float", 8, dynamic=True)),
    "fp8-static": Scheme(Format("float", 8, 0), ActFormat("float", 8, dynamic=False)),
    "fp8-block": Scheme(Format("float", 8, 128, rows=64), ActFormat("float", 8, dynamic=True)),
    "int8": Scheme(Format("int", 8, -1), ActFormat("int", 8, dynamic=True)),
    "nvfp4": Scheme(NVFP4, ActFormat("float", 4, dynamic=True)),
    "nvfp4a16": Scheme(NVFP4),
    **{key: rtn.SCHEMES[key] for key in ("mxfp4", "mxfp8", "w4a8-fp8")},
}
ROWS, COLUMNS = 96, 256


def quantized(scheme: Scheme, dtype: torch.dtype = torch.bfloat16) -> QTensor:
    """A random weight [96, 256] with an all-zero row, quantized."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[5] = 0
    if scheme.weights.rows > 1:
        scale = torch.rand(math.ceil(ROWS / scheme.weights.rows), scheme.weights.n_groups(COLUMNS)) + 0.5
        return QTensor((weight * 1000).to(torch.float8_e4m3fn), scale, None, scheme.weights)
    return round_to_nearest(weight, scheme.weights, scale_dtype=dtype)


def holds(name: str, scheme: Scheme) -> bool:
    try:
        FORMATS.get(name).storage(scheme)
    except UserError:
        return False
    return True


WRITTEN = [name for name in FORMATS.names() if isinstance(FORMATS.get(name), Writer)]


HELD = [(name, key) for name in WRITTEN for key in SCHEMES if holds(name, SCHEMES[key])]
STORED = [(name, key) for name, key in HELD if key in PAIRS or key not in INTS]


def stored(name: str, key: str) -> tuple[QTensor, dict, torch.Tensor | None]:
    scheme = SCHEMES[key]
    qt = quantized(scheme)
    scale = torch.tensor(0.26) if scheme.activations is not None and scheme.activations.calibrated else None
    scale = scale if scale is None or key == "nvfp4" else scale.bfloat16()
    return qt, FORMATS.get(name).tensors(qt, scheme, scale), scale


@pytest.mark.parametrize(("name", "key"), STORED)
def test_specs_are_those_of_what_is_stored(name, key):
    qt, tensors, _ = stored(name, key)
    specs = FORMATS.get(name).specs(SCHEMES[key], ROWS, COLUMNS, Spec.of(qt.scale).dtype)
    assert {local: Spec.of(tensor) for local, tensor in tensors.items()} == specs


@pytest.mark.parametrize(("name", "key"), [case for case in STORED if isinstance(FORMATS.get(case[0]), Reader)])
def test_what_is_read_is_what_was_stored(name, key):
    """Codes, scales and zero points come back, so that weights are equal bit for bit in every format that holds them."""
    format, scheme = FORMATS.get(name), SCHEMES[key]
    qt, tensors, scale = stored(name, key)
    back, input_scale = format.read(tensors, scheme, (ROWS, COLUMNS))
    assert torch.equal(back.q.float(), qt.q.float()) and back.q.dtype == qt.q.dtype
    if qt.global_scale is not None and name == "modelopt":  # which stores reciprocals
        assert torch.equal(1 / back.global_scale, 1 / qt.global_scale)
        assert scale is None or float(1 / input_scale) == float(1 / scale)
        return
    assert torch.equal(back.scale.float(), qt.scale.float()) and back.scale.shape == qt.scale.shape
    assert (back.zero_point is None) == (qt.zero_point is None) == scheme.weights.symmetric
    assert torch.equal(back.dequantize(torch.float32), qt.dequantize(torch.float32))
    assert (input_scale is None) == (scale is None) and (scale is None or float(input_scale) == float(scale))


def test_a_format_is_written_read_or_both():
    assert set(FORMATS.names()) - set(WRITTEN) == {"fp8"} and isinstance(fp8.FORMAT, Reader)
    assert [name for name in WRITTEN if not isinstance(FORMATS.get(name), Reader)] == [
        "bf16",
        "gguf",
        "openvino",
    ]


def test_formats_hold_what_they_should():
    """The table of the docs: which schemes each format can hold."""
    table = {name: {key for held, key in HELD if held == name} for name in WRITTEN}
    groups = ("--1", "-32", "-64", "-128")
    assert table["awq"] == {key for key in INTS if key.startswith("w4") and key.endswith(groups)}
    assert table["gptq"] == {key for key in INTS if key[1] in "48" and "asymmetric" not in key}
    assert table["gptq-v2"] == {key for key in INTS if key[1] in "248"}
    assert table["modelopt"] == {"fp8", "fp8-static", "nvfp4", "nvfp4a16"} and "fp8" not in table
    assert table["bf16"] == SCHEMES.keys() and table["compressed-tensors"] == SCHEMES.keys()


@pytest.mark.parametrize("key", [key for stored, key in STORED if stored == "awq"])
def test_awq_is_auto_rounds(key):
    """Oracle: auto-round packs the same weight with the same scales and zero points into the same words, and unpacks them."""
    scheme = SCHEMES[key]
    qt, tensors, _ = stored("awq", key)
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = qt.dequantize(torch.float32)
    zeros = torch.full(qt.scale.shape, 8) if qt.zero_point is None else qt.zero_point.int() + 8
    theirs = WQLinear_GEMM.from_linear(
        linear,
        4,
        scheme.weights.group,
        scales=qt.scale.float().T.contiguous(),
        zeros=zeros.T.contiguous(),
        device="cpu",
    )
    for local in ("qweight", "qzeros", "scales"):
        assert torch.equal(tensors[local], getattr(theirs, local)), local
    group = scheme.weights.group if scheme.weights.group > 0 else COLUMNS
    unpacked = dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, group)
    assert torch.equal(unpacked.T, qt.dequantize(torch.float32))


@pytest.mark.parametrize("key", [key for stored, key in STORED if stored == "gptq-v2"])
def test_gptq_is_auto_rounds(key):
    """Oracle: auto-round's packing for GPTQ v1. v2 differs by one in every zero point; v1 is written symmetric only."""
    scheme = SCHEMES[key]
    bits = scheme.weights.bits
    qt, tensors, _ = stored("gptq-v2", key)
    middle = 2 ** (bits - 1)
    zeros = torch.full(qt.scale.shape, middle) if qt.zero_point is None else qt.zero_point.int() + middle
    theirs = QuantLinear(bits, scheme.weights.group, COLUMNS, ROWS, False, g_idx=True)
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = qt.dequantize(torch.float32)
    theirs.pack(linear, qt.scale.float(), zeros.clone(), device="cpu")  # it changes them
    for local in ("qweight", "scales", "g_idx"):
        assert torch.equal(tensors[local], getattr(theirs, local)), local
    theirs.pack(linear, qt.scale.float(), zeros + 1, device="cpu")  # it takes one away
    assert torch.equal(tensors["qzeros"], theirs.qzeros)
    if scheme.weights.symmetric and bits > 2:
        theirs.pack(linear, qt.scale.float(), middle, device="cpu")
        first = gptq.FORMAT.tensors(qt, scheme)
        assert all(torch.equal(first[local], getattr(theirs, local)) for local in first)


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("awq", "w8-symmetric-64", "4-bit integer weights"),
        ("awq", "w4-symmetric-16", "groups of 32, 64 or 128"),
        ("awq", "fp8", "4-bit integer weights"),
        ("gptq", "w4-asymmetric-64", "symmetric weights only"),
        ("gptq", "w2-symmetric-64", "4 or 8 bits"),
        ("gptq-v2", "w3-symmetric-64", "2, 4 or 8 bits"),
        ("modelopt", "w4-symmetric-64", "ModelOpt files hold"),
        ("modelopt", "int8", "ModelOpt files hold"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_by_name(name, key, message):
    with pytest.raises(UserError, match=message):
        FORMATS.get(name).storage(SCHEMES[key])


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-v2"])
def test_scales_are_16_bit_floats_or_refused(name):
    format, scheme = FORMATS.get(name), SCHEMES["w4-symmetric-64"]
    exact = quantized(scheme, torch.float16)
    assert format.tensors(exact, scheme)["scales"].dtype == torch.float16
    with pytest.raises(UserError, match="scales are no 16-bit floats"):
        format.tensors(quantized(scheme, torch.float32), scheme)
    tiny = QTensor(exact.q, torch.full_like(exact.scale, 1e-9, dtype=torch.bfloat16), None, exact.format)
    with pytest.raises(UserError, match="scales are no 16-bit floats"):
        format.tensors(tiny, scheme)


def test_one_scheme_or_several():
    """AutoAWQ has one scheme for all; GPTQ and ModelOpt name layers that differ; only CT and ModelOpt hold KV scales."""
    four, eight = SCHEMES["w4-symmetric-64"], SCHEMES["w8-symmetric-64"]
    names = {(f"model.layers.{i}.mlp.down_proj",): four if i else eight for i in range(3)}
    layers = Layers([], [Kept(("lm_head",), False)], names, kv_cache=True)
    counts = {name: len(formats.format_problems(FORMATS.get(name), layers)) for name in FORMATS.names()}
    assert counts == {
        "awq": 3,
        "bf16": 1,
        "compressed-tensors": 0,
        "fp8": 1,
        "gguf": 1,
        "gptq": 1,
        "gptq-v2": 1,
        "mlx": 1,
        "modelopt": 2,
        "openvino": 1,
    }
    block = gptq.FORMAT.configs(layers)["config.json"]
    assert block["bits"] == 4 and len(block["dynamic"]) == 2
    for name, scheme in names.items():
        assert gptq.FORMAT.scheme_in(block, name, {"qweight": Spec("I32", (1,))}, (1, 1)) == scheme
    fp8, static = SCHEMES["fp8"], SCHEMES["fp8-static"]
    algorithms = {name: fp8 if scheme == four else static for name, scheme in names.items()}
    mixed = modelopt.FORMAT.configs(Layers([], [], algorithms))["config.json"]
    assert mixed["quant_algo"] == "MIXED_PRECISION"
    for name in names:
        assert modelopt.FORMAT.scheme_in(mixed, name, {"weight_scale": Spec("F32", ())}, (1, 1)) == algorithms[name]


@pytest.mark.parametrize("family", models.REGISTRY.names())
def test_every_reader_resolves_names_to_the_same_layers(family, tmp_path):
    """In every family, one decoder layer skipped besides the tower, projector and head."""
    folder = build(family, tmp_path)
    model, spec = models.build_meta_model(folder), models.spec_for(models.read_config(folder))
    names = models.disk_names(model, models.tensor_headers(folder))
    groups = models.resolve_groups(model, spec)
    skipped = groups[-1].linears[0]
    for format, key in ((awq.FORMAT, "w4-symmetric-32"), (gptq.FORMAT, "w4-symmetric-32"), (modelopt.FORMAT, "fp8")):
        schemes = {linear: SCHEMES[key] for group in groups for linear in group.linears if group != groups[-1]}
        block = format.configs(describe_layers(schemes, model, names, spec))["config.json"]
        every = {linear: str(schemes[linear]) if linear in schemes else None for linear in models.linear_names(model)}
        assert misnamed(format, block, every, names, spec) == [], format.METHOD
        wrong = misnamed(format, block, every | {skipped: "quantized"}, names, spec)
        assert {alias.split(".")[-1] for alias, _, _ in wrong} == {skipped.split(".")[-1]}, format.METHOD


@pytest.mark.parametrize("key", ["nvfp4", "nvfp4a16"])
def test_modelopts_nvfp4_is_compressed_tensors_with_reciprocals(key):
    """Oracle: the other exporter, and what vLLM 0.32 makes of either: it takes 1 / weight_global_scale, and weight_scale_2."""
    _, theirs, _ = stored("modelopt", key)
    _, plain, _ = stored("compressed-tensors", key)
    assert torch.equal(theirs["weight"], plain["weight_packed"])
    assert torch.equal(theirs["weight_scale"].view(torch.uint8), plain["weight_scale"].view(torch.uint8))
    assert float(theirs["weight_scale_2"]) == float(1 / plain["weight_global_scale"])
    assert key == "nvfp4a16" or float(theirs["input_scale"]) == float(1 / plain["input_global_scale"])


def test_reciprocals_come_back():
    """Whatever number compressed-tensors stores: the reciprocal of what is read is what was stored."""
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(1)) * 10000
    for value in values[:2000]:
        stored = 1 / value.reshape(1)
        assert torch.equal(1 / modelopt._reciprocal(stored), stored)


def test_blocks_of_fp8_are_multiplied_block_by_block():
    """Oracle: a loop over blocks, whose last ones the edges cut."""
    fmt = Format("float", 8, 128, rows=64)
    q = torch.randn(96, 200, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.5
    expected = torch.empty(96, 200)
    for i in range(2):
        for j in range(2):
            block = slice(64 * i, 64 * i + 64), slice(128 * j, 128 * j + 128)
            expected[block] = q.float()[block] * scale[i, j]
    assert torch.equal(QTensor(q, scale, None, fmt).dequantize(torch.float32), expected)
    back, _ = fp8.FORMAT.read({"weight": q, "weight_scale": scale}, Scheme(fmt), (96, 200))
    assert torch.equal(back.dequantize(torch.float32), expected)
    config = {"quant_method": "fp8", "weight_block_size": [64, 128]}
    scheme = fp8.FORMAT.scheme_in(config, ("x",), {"weight_scale": Spec("F32", (2, 2))}, (96, 200))
    assert scheme == SCHEMES["fp8-block"]
