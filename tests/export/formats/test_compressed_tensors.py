"""Stored tensors against compressed-tensors' own compressor, and the config block against its own reader."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

from tests.kit.rtn import SCHEMES
from vlmcompress.export.formats import compressed_tensors as ct
from vlmcompress.numerics import NVFP4, ActFormat, Format, Scheme, round_to_nearest
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Spec

MORE = {
    "w3": Scheme(Format("int", 3, 32)),
    "w8-asymmetric": Scheme(Format("int", 8, 64, symmetric=False)),
    "fp8-weight-only": Scheme(Format("float", 8, -1)),
}


def weight() -> torch.Tensor:
    weights = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weights[5] = 0
    return weights


@pytest.fixture(params=sorted(SCHEMES | MORE))
def case(request):
    """A scheme, a quantized random weight [96, 256] with an all-zero row, and its input scale."""
    scheme = (SCHEMES | MORE)[request.param]
    qt = round_to_nearest(weight(), scheme.weights, scale_dtype=torch.bfloat16)
    calibrated = scheme.activations is not None and scheme.activations.calibrated
    return scheme, qt, torch.tensor(0.25) if calibrated else None


def library(scheme):
    """compressed-tensors' own compressor and scheme object for our config block."""
    config = QuantizationConfig.model_validate(ct.quantization_config([(scheme, ["Linear"])], []))
    group = config.config_groups["group_0"]
    return BaseCompressor.get_value_from_registry(group.format), group


def test_same_bits_as_the_library(case):
    """Oracle: compressed-tensors' compressor, given the weight with our scales, stores the same tensors."""
    scheme, qt, input_scale = case
    compressor, group = library(scheme)
    state = {"weight": weight().float(), "weight_scale": qt.step if scheme.weights.mx else qt.scale.float()}
    if qt.zero_point is not None:
        state["weight_zero_point"] = qt.zero_point
    if qt.global_scale is not None:
        state["weight_global_scale"] = qt.global_scale
    expected = compressor.compress(state, group)
    stored = ct.FORMAT.tensors(qt, scheme, input_scale)
    assert stored.keys() - {"input_scale", "input_global_scale"} == expected.keys()
    for name, tensor in expected.items():
        got = stored[name].to(tensor.dtype) if name == "weight_scale" else stored[name]
        assert got.dtype == tensor.dtype and torch.equal(got.float(), tensor.float()), name


def test_library_reads_back_our_weight(case):
    """Oracle: compressed-tensors' decompressor returns exactly `QTensor.dequantize`."""
    scheme, qt, input_scale = case
    compressor, group = library(scheme)
    stored = ct.FORMAT.tensors(qt, scheme, input_scale)
    back, _ = ct.FORMAT.read(stored, scheme, tuple(qt.q.shape))
    assert torch.equal(back.dequantize(torch.float32), qt.dequantize(torch.float32))
    stored["weight_scale"] = stored["weight_scale"].float()
    back = compressor.decompress(stored, group)["weight"]
    assert torch.equal(back.float(), qt.dequantize(torch.bfloat16 if scheme.weights.nvfp4 else torch.float32).float())


def test_specs_are_those_of_what_is_stored(case):
    scheme, qt, input_scale = case
    specs = {name: Spec.of(tensor) for name, tensor in ct.FORMAT.tensors(qt, scheme, input_scale).items()}
    assert specs == ct.FORMAT.specs(scheme, *qt.q.shape, Spec.of(qt.scale).dtype)


def test_config_names_the_scheme(case):
    scheme, _, _ = case
    config = ct.quantization_config([(scheme, ["Linear"])], ["lm_head"])
    assert ct.scheme_of(config["config_groups"]["group_0"]) == scheme
    assert config["format"] == config["config_groups"]["group_0"]["format"] == ct.FORMAT.storage(scheme)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("nvfp4", "NVFP4"),
        ("nvfp4a16", "NVFP4A16"),
        ("mxfp4", "MXFP4"),
        ("mxfp4a16", "MXFP4A16"),
        ("mxfp8", "MXFP8"),
        ("w4a8-fp8", "W4AFP8"),
    ],
)
def test_floats_in_blocks_are_spelt_as_the_preset(name, preset):
    """Oracle: compressed-tensors' presets."""
    config = QuantizationConfig.model_validate(ct.quantization_config([(SCHEMES[name], ["Linear"])], []))
    group, expected = config.config_groups["group_0"], preset_name_to_scheme(preset, ["Linear"])
    assert group.weights == expected.weights and group.input_activations == expected.input_activations


def test_several_formats_are_mixed_precision():
    groups = [(SCHEMES["fp8"], ["re:.*visual.*"]), (SCHEMES["w4-symmetric"], ["Linear"])]
    config = ct.quantization_config(groups, [], kv_cache=True)
    assert config["format"] == "mixed-precision"
    parsed = QuantizationConfig.model_validate(config)
    assert (parsed.kv_cache_scheme.num_bits, parsed.kv_cache_scheme.type) == (8, "float")


def test_nothing_quantized_has_no_config():
    assert ct.quantization_config([], []) == {}


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(Format("float", 8, 128)),
        Scheme(Format("int", 4, 0)),
        Scheme(Format("int", 4, 128), ActFormat("int", 8, dynamic=True)),
        Scheme(Format("int", 8, -1, symmetric=False), ActFormat("int", 8, dynamic=True)),
        Scheme(NVFP4, ActFormat("float", 8, dynamic=True)),
        Scheme(Format("float", 8, -1), ActFormat("float", 4, dynamic=True)),
    ],
)
def test_what_no_engine_reads_is_refused(scheme):
    with pytest.raises(UserError):
        ct.FORMAT.storage(scheme)


def test_an_input_scale_must_belong_to_the_scheme(case):
    scheme, qt, input_scale = case
    with pytest.raises(ValueError, match="input scale"):
        ct.FORMAT.tensors(qt, scheme, None if input_scale is not None else torch.tensor(1.0))


def test_zero_points_must_fill_words():
    with pytest.raises(ValueError, match="whole words"):
        ct.FORMAT.specs(SCHEMES["w4-asymmetric"], 100, 256, "BF16")


@pytest.mark.parametrize("name", ["a.layers.0.q_proj", "a.visual.blocks.1.qkv", "visual.merger.0", "lm_head", "b.x"])
def test_group_of_agrees_with_the_library(name):
    """Oracle: compressed-tensors' matching of targets and ignore entries."""
    from compressed_tensors.utils.match import match_targets

    groups = [
        (SCHEMES["fp8"], [r"re:(.*\.)?visual\..*", "b.x"]),
        (SCHEMES["w4-symmetric"], ["Linear"]),
    ]
    config = ct.quantization_config(groups, ["lm_head", r"re:.*\bmerger\..*"])
    owner = {target: key for key, group in config["config_groups"].items() for target in group["targets"]}
    module = torch.nn.Linear(1, 1)
    expected = None
    if not match_targets(name, module, config["ignore"]):
        expected = owner[match_targets(name, module, owner)[0]]
    assert ct.group_of(config, name) == expected
