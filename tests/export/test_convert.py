"""Checkpoints brought from one format into another: the same weights bit for bit, other tools' files read, damage refused."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from auto_round.export.export_to_awq.utils import dequantize_gemm
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, CompressedTensorsConfig

from tests.kit import rtn
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.evaluation.doctor.files import diagnose
from vlmcompress.export import manifest
from vlmcompress.export.convert import convert
from vlmcompress.export.stored import Stored
from vlmcompress.utils.errors import UserError

pytestmark = pytest.mark.representatives

NVFP4 = ("llava", "nvfp4"), ("qwen2-5-vl", "nvfp4a16")
SCHEMES = {"awq": "w4-asymmetric", "gptq": "w4-symmetric", "gptq-v2": "w4-asymmetric", "modelopt": "fp8"}
# Families that differ in what a format stores of them: prefixes of names, layers kept next to others with a head, experts.
WHOLE = ("llava", "qwen3-5", "qwen3-vl-moe")
UNREAD = ("gemma4-moe", "idefics3", "qwen3-vl-moe")
"""Families whose zero points in GPTQ v2 no engine is known to load."""
CASES = [
    pytest.param(family, name, marks=[] if family in WHOLE or (number + at) % len(SCHEMES) == 0 else pytest.mark.slow)
    for number, family in enumerate(models.REGISTRY.names())
    for at, name in enumerate(SCHEMES)
]  # the other families in one format each; of the rest `exporters/test_formats.py` compares names in every format


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A function: family -> a tiny model."""
    return cache(lambda family: build(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def ours(source, tmp_path_factory):
    """A function: family, scheme -> our checkpoint in compressed-tensors."""
    result: dict[tuple, Path] = {}

    def get(family: str, scheme: str, **keys) -> Path:
        key = (family, scheme, *sorted(keys))
        if key not in result:
            result[key] = tmp_path_factory.mktemp(family) / "ct"
            rtn.write(source(family), result[key], rtn.SCHEMES[scheme], **keys)
        return result[key]

    return get


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def edited(folder: Path, change) -> None:
    """Rewrite a folder's weights as `change` leaves them, and its config without our traces."""
    weights = tensors(folder)
    config = json.loads((folder / "config.json").read_text())
    change(weights, config)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name in (manifest.MANIFEST, "quantize_config.json"):
        (folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_converting_there_and_back_gives_the_same_file(family, name, ours, tmp_path):
    start = ours(family, SCHEMES[name])
    record = convert(start, tmp_path / "there", name)
    assert record["converted"] == {"from": "compressed-tensors", "to": name, "folder": "ct"}
    assert record["recipe"]["format"] == name and record["errors"] == manifest.read_manifest(start)["errors"]
    convert(tmp_path / "there", tmp_path / "back", "compressed-tensors")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (start / "config.json").read_text()
    )
    problems = {check.name: check.detail for check in diagnose(tmp_path / "there") if not check.ok}
    if name == "gptq-v2" and family in UNREAD:
        assert problems.pop("readers").startswith("no engine is known to load it")
    assert not problems


@pytest.mark.parametrize(("family", "scheme"), NVFP4)
def test_nvfp4_in_modelopts_files(family, scheme, ours, tmp_path):
    """Global scales come back as numbers with the same reciprocals, which is what engines compute with; all else is equal."""
    start = ours(family, scheme)
    convert(start, tmp_path / "there", "modelopt")
    assert all(check.ok for check in diagnose(tmp_path / "there")), diagnose(tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", "compressed-tensors")
    before, after = tensors(start), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name.endswith("global_scale"):
            assert torch.equal(1 / value, 1 / after[name])
        else:
            assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)), name


def test_fp8_in_blocks_becomes_compressed_tensors_and_16_bits(source, tmp_path):
    """As DeepSeek's and Qwen's files are. Oracles: a loop over blocks; compressed-tensors' own decompressor."""
    folder = tmp_path / "fp8"
    shutil.copytree(source("qwen2-5-vl"), folder)
    expected = {}

    def blocks(weights, config):
        for name in [name for name in weights if ".layers." in name and name.endswith("_proj.weight")]:
            weight = weights[name].float()
            scale = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
            for i in range(scale.shape[0]):
                for j in range(scale.shape[1]):
                    part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                    scale[i, j] = weight[part].abs().max() / 448
                    codes = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
                    weights[name] = weights[name] if (i, j) != (0, 0) else torch.empty_like(weight).to(codes.dtype)
                    weights[name][part] = codes
                    expected.setdefault(name, torch.empty_like(weight))[part] = codes.float() * scale[i, j]
            weights[f"{name}_scale_inv"] = scale
        block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        config["quantization_config"] = block | {"modules_to_not_convert": ["visual", "lm_head"]}

    edited(folder, blocks)
    convert(folder, tmp_path / "ct", "compressed-tensors")
    assert all(check.ok for check in diagnose(tmp_path / "ct")), diagnose(tmp_path / "ct")
    convert(folder, tmp_path / "bf16", "bf16")
    plain, names = tensors(tmp_path / "bf16"), Stored.of(folder).names
    assert expected and all(torch.equal(plain[name], value.bfloat16()) for name, value in expected.items())
    model = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ct", quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.float32
    )
    state = model.state_dict()
    for memory, disk in names.items():
        if disk in expected:
            assert torch.equal(state[memory].float(), expected[disk]), memory


def test_weights_are_equal_across_formats_and_in_16_bits(ours, tmp_path):
    """Oracle: `QTensor.dequantize` of what was quantized in the first place."""
    start = ours("llava", "w4-symmetric")
    expected = {name: weight.dequantize(torch.float32) for name, (weight, _, _) in Stored.of(start).items()}
    for name in ("awq", "gptq", "gptq-v2"):
        convert(start, tmp_path / name, name)
        read_back = Stored.of(tmp_path / name)
        assert read_back.keys() == expected.keys()
        assert all(torch.equal(read_back[key][0].dequantize(torch.float32), expected[key]) for key in expected)
    convert(tmp_path / "awq", tmp_path / "bf16", "bf16")
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    plain, names = tensors(tmp_path / "bf16"), Stored.of(start).names
    assert all(torch.equal(plain[names[f"{key}.weight"]], value.bfloat16()) for key, value in expected.items())


def test_scales_of_the_kv_cache_keep_their_values(ours, tmp_path):
    start = ours("llava", "fp8", kv_cache=True)
    convert(start, tmp_path / "out", "modelopt")
    before, after = tensors(start), tensors(tmp_path / "out")
    old = [name for name in before if name.endswith("k_scale")]
    assert old and all(
        torch.equal(before[n], after[n.replace(".k_scale", ".k_proj.k_scale")]) and n not in after for n in old
    )
    quantization = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert quantization["kv_cache_quant_algo"] == "FP8" and quantization["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    convert(tmp_path / "out", tmp_path / "back", "compressed-tensors")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("scheme", "name"), [("fp8", "bf16"), ("w4-asymmetric", "awq"), ("w4-symmetric", "gptq")])
def test_scales_of_the_kv_cache_are_left_out_with_a_warning(ours, tmp_path, scheme, name):
    """Where a format has no place for them. All else is what it is without a KV cache in FP8."""
    record = convert(ours("llava", scheme, kv_cache=True), tmp_path / "out", name)
    assert [line for line in record["warnings"] if "scales of the FP8 KV cache were left out" in line]
    convert(ours("llava", scheme), tmp_path / "plain", name)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert all(check.ok for check in diagnose(tmp_path / "out")), diagnose(tmp_path / "out")


def test_awq_of_another_tool(ours, tmp_path):
    """As AutoAWQ left them: numbers under older names, no manifest, no `sym`. Oracle: auto-round's unpacking."""
    convert(ours("qwen2-5-vl", "w4-asymmetric"), tmp_path / "awq", "awq")

    def foreign(weights, config):
        block = {"quant_method": "awq", "version": "GEMM", "w_bit": 4, "q_group_size": 32, "zero_point": True}
        config["quantization_config"] = block | {"modules_to_not_convert": ["visual"]}

    edited(tmp_path / "awq", foreign)
    record = convert(tmp_path / "awq", tmp_path / "out", "compressed-tensors")
    assert record["recipe"]["scheme"] == "converted" and record["converted"]["from"] == "awq"
    assert all(check.ok for check in diagnose(tmp_path / "out")), diagnose(tmp_path / "out")
    stored, files = Stored.of(tmp_path / "out"), tensors(tmp_path / "awq")
    for name, (weight, _, _) in stored.items():
        prefix = stored.layers[name].prefix
        parts = (files[prefix + local] for local in ("qweight", "qzeros"))
        theirs = dequantize_gemm(*parts, files[f"{prefix}scales"].float(), 4, 32)
        assert torch.equal(theirs.T, weight.dequantize(torch.float32))


def test_compressed_tensors_of_another_tool(ours, tmp_path):
    """As llm-compressor leaves them: layers ignored in one naming only, keys that say nothing. The weights stay as they are."""
    shutil.copytree(ours("llava", "w4-symmetric"), tmp_path / "theirs")

    def foreign(weights, config):
        block = config["quantization_config"]
        block["ignore"] = ["re:.*vision_tower.*", "re:.*multi_modal_projector.*", "lm_head"]
        group = block["config_groups"]["group_0"]
        del group["input_activations"], group["output_activations"]
        group["weights"] |= {"actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}

    edited(tmp_path / "theirs", foreign)
    convert(tmp_path / "theirs", tmp_path / "out", "compressed-tensors")
    assert all(check.ok for check in diagnose(tmp_path / "out")), diagnose(tmp_path / "out")
    before, after = tensors(tmp_path / "theirs"), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_scales_finer_than_the_models_type_are_kept(ours, tmp_path):
    """Scales that BF16 does not hold stay 16-bit floats; nothing is rounded, and a warning explains it."""
    convert(ours("llava", "w4-symmetric"), tmp_path / "gptq", "gptq")

    def finer(weights, config):
        for name in [name for name in weights if name.endswith(".scales")]:
            weights[name] = (weights[name].float() * 1.001).half()

    edited(tmp_path / "gptq", finer)
    record = convert(tmp_path / "gptq", tmp_path / "out", "compressed-tensors")
    assert "transformers does not compute with both types" in record["warnings"][-1]
    before, after = Stored.of(tmp_path / "gptq"), Stored.of(tmp_path / "out")
    for name in before:
        assert after[name][0].scale.dtype == torch.float16
        assert torch.equal(before[name][0].dequantize(torch.float32), after[name][0].dequantize(torch.float32))


@pytest.mark.parametrize(
    ("scheme", "keys", "format", "message"),
    [
        ("w8a16", {}, "awq", "4-bit integer weights"),
        ("w4-asymmetric", {}, "gptq", "symmetric weights only"),
        ("int8", {}, "modelopt", "ModelOpt files hold"),
        ("fp8", {}, "compressed-tensors", "is already compressed-tensors"),
        ("fp8", {}, "awk", "unknown format 'awk'; did you mean 'awq'"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(ours, tmp_path, scheme, keys, format, message):
    with pytest.raises(UserError, match=message):
        convert(ours("llava", scheme, **keys), tmp_path / "out", format)
    assert not list(tmp_path.iterdir())


def drop(suffix):
    def change(weights, config):
        del weights[next(name for name in weights if name.endswith(suffix))]

    return change


def cut(weights, config):
    name = next(name for name in weights if name.endswith("qweight"))
    weights[name] = weights[name][:-8].contiguous()


def shuffled(weights, config):
    name = next(name for name in weights if name.endswith("g_idx"))
    weights[name] = weights[name].flip(0).contiguous()


def endless(weights, config):
    name = next(name for name in weights if name.endswith("scales"))
    weights[name] = torch.full_like(weights[name], torch.inf)


def block(**values):
    def change(weights, config):
        config["quantization_config"] |= values

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("qzeros"), "tensor '.*qzeros' of a quantized layer"),
        (drop("norm.weight"), "checkpoint lacks 1 tensors"),
        (cut, "its scheme needs I32"),
        (shuffled, "not in the order of groups"),
        (endless, "NaN or infinite"),
        (block(bits=3), "2, 4 or 8 bits"),
        (block(group_size=64), "its scheme needs"),
        (block(group_size="128"), "group_size '128'"),
        (block(sym=None), "sym None"),
        (block(dynamic={"+:(": {}}), "not a regular expression"),
        (block(quant_method="bitsandbytes"), "of the unsupported kind 'bitsandbytes'"),
        (block(dynamic=[1]), "is not valid for gptq"),
    ],
)
def test_damaged_files_are_refused(change, message, ours, tmp_path):
    convert(ours("llava", "w4-symmetric"), tmp_path / "gptq", "gptq")
    edited(tmp_path / "gptq", change)
    with pytest.raises(UserError, match=message) as caught:
        convert(tmp_path / "gptq", tmp_path / "out", "compressed-tensors")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gptq"]


def test_pickles_truncated_files_and_plain_models_are_refused(source, ours, tmp_path):
    with pytest.raises(UserError, match="is not quantized"):
        convert(source("llava"), tmp_path / "out", "awq")
    broken = tmp_path / "broken"
    shutil.copytree(ours("llava", "w4-symmetric"), broken)
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(UserError, match="only pickled weights"):
        convert(broken, tmp_path / "out", "awq")
    whole = (broken / "pytorch_model.bin").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="model.safetensors"):
        convert(broken, tmp_path / "out", "awq")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_an_edited_checkpoint_is_refused(ours, tmp_path):
    """Its manifest would vouch for other weights."""
    shutil.copytree(ours("llava", "w4-symmetric"), tmp_path / "ct")
    weights = tensors(tmp_path / "ct")
    name = next(name for name in weights if name.endswith("norm.weight"))
    save_file(weights | {name: weights[name] + 1}, tmp_path / "ct" / "model.safetensors")
    with pytest.raises(UserError, match="has changed since it was written"):
        convert(tmp_path / "ct", tmp_path / "out", "awq")
