"""Other tools' configs: what is read means the same afterwards, what changes nothing passes, all else is refused by its key."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AwqConfig, GPTQConfig

from tests.kit import rtn
from tests.kit.tiny import build
from vlmcompress import cli
from vlmcompress.export import auto_round, manifest
from vlmcompress.export.convert import convert
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.export.stored import Stored
from vlmcompress.numerics import Format, Scheme, round_to_nearest
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import FORMATS

ROTATION = {
    "type": "hadamard",
    "apply": [
        {"targets": ["re:.*down_proj$"], "location": "input"},
        {"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": True},
    ],
}
FUSED = {"type": "hadamard", "apply": [{"targets": ["re:.*o_proj$"], "location": "weight_output"}]}
OUTPUTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}


def compressed(**keys) -> dict:
    """A block of compressed-tensors as llm-compressor writes it: W8A8, and keys without effect."""
    group = preset_name_to_scheme("W8A8", ["Linear"])
    block = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"], format="int-quantized").to_dict()
    sparsity = {"format": "dense", "global_sparsity": 0.14, "ignore": ["lm_head"], "sparsity_structure": "unstructured"}
    block |= {"transform_config": {}, "sparsity_config": sparsity, "provider": "auto-round", "version": "0.20.0"}
    return json.loads(json.dumps(block, default=str)) | keys


def grouped(**keys) -> dict:
    """The same with keys of its group, `weights.KEY` and `input_activations.KEY` of a part of it."""
    block = compressed()
    for key, value in keys.items():
        part, _, inner = key.partition("__")
        target = block["config_groups"]["group_0"]
        if inner:
            target, part = target[part], inner
        target[part] = value
    return block


GPTQMODEL = {
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "lm_head": False,
    "method": "gptq",
    "quant_method": "gptq",
    "format": "gptq",
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05, "pack_impl": "cpu", "fallback": {"smooth": None}},
    "sym": True,
    "dynamic": {"-:.*visual.*": {}, "+:.*down.*": {"bits": 8, "group_size": 64, "damp_percent": 0.1}},
}
QWEN_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
NVIDIA = {
    "quant_method": "modelopt",
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "dynamic": False}}
    },
}
NVIDIA_FILE = {
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quantization": {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
        "quantized_layers": {"a.b": {"quant_algo": "NVFP4", "group_size": 16}},
    },
}


@pytest.mark.parametrize(
    ("format", "block"),
    [
        ("compressed-tensors", compressed()),
        ("compressed-tensors", compressed(transform_config={"config_groups": {"R1": FUSED}})),
        ("compressed-tensors", compressed(kv_cache_scheme=OUTPUTS | {"observer": "minmax", "group_size": None})),
        ("compressed-tensors", grouped(weights__actorder="weight", weights__observer="mse")),
        ("gptq", GPTQConfig(bits=4, format="gptq_v2").to_dict()),
        ("gptq", GPTQMODEL),
        ("awq", AwqConfig(bits=4).to_dict()),
        ("awq", {"quant_method": "awq", "version": "GEMM", "w_bit": 4, "q_group_size": 128, "zero_point": True}),
        ("fp8", QWEN_FP8),
        ("modelopt", NVIDIA),
        ("modelopt", NVIDIA_FILE),
    ],
)
def test_configs_of_other_tools_pass(format, block):
    """Blocks by the tools' own classes, where they are installed, and as published checkpoints have them."""
    FORMATS.get(format).require_supported(block)


@pytest.mark.parametrize(
    ("format", "block", "key"),
    [
        ("compressed-tensors", compressed(transform_config={"config_groups": {"R4": ROTATION}}), "transform_config"),
        ("compressed-tensors", compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        ("compressed-tensors", compressed(kv_cache_scheme=OUTPUTS | {"strategy": "attn_head"}), "kv_cache_scheme"),
        ("compressed-tensors", compressed(kv_cache_scheme=OUTPUTS | {"num_bits": 4}), "kv_cache_scheme"),
        ("compressed-tensors", compressed(future_field={"a": 1}), "future_field"),
        ("compressed-tensors", compressed(fp8_dtype_flavor="gaudi2"), "fp8_dtype_flavor"),
        ("compressed-tensors", grouped(output_activations=OUTPUTS), "group_0.output_activations"),
        ("compressed-tensors", grouped(weights__future_codebook="nf4"), "group_0.weights.future_codebook"),
        ("compressed-tensors", grouped(weights__actorder="group"), "group_0.weights.actorder"),
        ("compressed-tensors", grouped(input_activations__symmetric=False), "input_activations.symmetric: false"),
        ("compressed-tensors", grouped(input_activations__strategy="tensor"), 'input_activations.strategy: "tensor"'),
        ("gptq", GPTQMODEL | {"rotation": "hadamard"}, 'rotation: "hadamard"'),
        ("gptq", GPTQMODEL | {"adapter": {"name": "lora", "rank": 64}}, "adapter"),
        ("gptq", GPTQMODEL | {"format": "marlin"}, "format"),
        ("gptq", GPTQMODEL | {"pack_dtype": "int16"}, "pack_dtype"),
        ("gptq", GPTQMODEL | {"dynamic": {"+:x": {"adapter": {"rank": 8}}}}, r"dynamic\.\+:x\.adapter"),
        ("awq", AwqConfig(bits=4).to_dict() | {"dynamic": {"+:x": {"bits": 8}}}, "dynamic"),
        ("awq", AwqConfig(bits=4).to_dict() | {"rotation": "random"}, "rotation"),
        ("fp8", QWEN_FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt"),
        ("fp8", QWEN_FP8 | {"modules_to_convert": ["embed"]}, "modules_to_convert"),
        ("modelopt", NVIDIA | {"kv_cache_scheme": "NVFP4"}, "kv_cache_scheme"),
        (
            "modelopt",
            {"quantization": {"quant_algo": "NVFP4", "pre_quant_scale": True}},
            "quantization.pre_quant_scale",
        ),
        ("modelopt", NVIDIA | {"quantized_layers": {"a": {"smoothing": 1}}}, "quantized_layers.a.smoothing"),
    ],
)
def test_unsupported_configs_are_refused_by_name(format, block, key):
    with pytest.raises(UserError, match=f"quantization_config has .*{key}") as caught:
        FORMATS.get(format).require_supported(block)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"hadamard_config": {"block_size": 32}}, "hadamard_config"),
        ({"rotation_config": {"hadamard_type": "hadamard"}}, "rotation_config"),
        ({"static_kv_dtype": "fp8"}, "static_kv_dtype"),
        ({"extra_config": {"lm_head": {"bits": 8, "data_type": "mx_fp"}}}, "extra_config.lm_head.data_type"),
    ],
)
def test_auto_rounds_keys_are_refused_by_name(keys, key):
    with pytest.raises(UserError, match=f"quantization_config has {key}"):
        auto_round.translated(AUTO_ROUND | keys)
    extra = {
        "lm_head": dict.fromkeys(("super_bits", "rotation_config")) | {"bits": 8, "act_bits": 16, "act_dynamic": True}
    }
    auto_round.translated(AUTO_ROUND | {"iters": 0, "static_kv_granularity": "tensor", "extra_config": extra})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def block_of(folder: Path, **keys) -> None:
    """Change a checkpoint's quantization config, as another tool's."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | keys
    (folder / "config.json").write_text(json.dumps(config))
    (folder / manifest.MANIFEST).unlink(missing_ok=True)


def run(capsys, *arguments) -> tuple[int, str]:
    code = cli.main([*map(str, arguments)])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("verb", ["export", "quantize"])
def test_no_command_drops_a_key(verb, tmp_path, capsys):
    """Of a checkpoint in FP8, with a rotation of inputs while it runs, and with a KV cache in FP8 that has no scales."""
    folder = tmp_path / "fp8"
    rtn.write(build("llava", tmp_path / "source"), folder, rtn.SCHEMES["fp8"])
    plain = copy.deepcopy(json.loads((folder / "config.json").read_text())["quantization_config"])
    command = {"export": (), "quantize": ("--from-quantized", "--scheme", "rtn")}[verb]
    format = {"export": ("--format", "bf16"), "quantize": ()}[verb]
    for keys, message in (
        ({"transform_config": {"config_groups": {"R4": ROTATION}}}, "transform_config"),
        ({"kv_cache_scheme": OUTPUTS}, "kv_cache_scheme, but the checkpoint has no scales of keys and values"),
    ):
        block_of(folder, **(plain | keys))
        code, error = run(capsys, verb, folder, "-o", tmp_path / "out", *command, *format)
        assert code == 2 and message in error and error.count("\n") == 1, error
        assert not (tmp_path / "out").exists()
        block_of(folder, **dict.fromkeys(keys))
    assert run(capsys, verb, folder, "-o", tmp_path / "out", *command, *format)[0] == 0


@pytest.fixture(scope="module")
def ministral(tmp_path_factory) -> Path:
    """A tiny Ministral 3 as Mistral publishes it: FP8 with one scale for a matrix, and one for its inputs, found beforehand."""
    folder = build("mistral3", tmp_path_factory.mktemp("ministral") / "model")
    weights = tensors(folder)
    for name in [
        name for name in weights if ".layers." in name and name.endswith("_proj.weight") and "tower" not in name
    ]:
        rounded = round_to_nearest(weights[name], Format("float", 8, 0), scale_dtype=torch.bfloat16)
        weights[name] = rounded.q
        weights[f"{name}_scale_inv"] = rounded.scale.reshape(())
        weights[name.replace(".weight", ".activation_scale")] = torch.tensor(0.03 + len(weights) / 2**14).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    block_of(
        folder,
        quant_method="fp8",
        activation_scheme="static",
        weight_block_size=None,
        modules_to_not_convert=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    )
    return folder


def test_ministral_3_as_published(ministral, tmp_path, capsys):
    """Oracle: transformers' own reading, which is dequantized where there is no GPU. In compressed-tensors it is fp8-static."""
    theirs = AutoModelForImageTextToText.from_pretrained(ministral, dtype=torch.bfloat16).state_dict()
    code, error = run(capsys, "export", ministral, "-o", tmp_path / "ct")
    assert code == 0, error
    before, after = Stored.of(ministral), Stored.of(tmp_path / "ct")
    static = compressed_tensors.scheme_of(
        {
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        }
    )
    assert isinstance(static, Scheme) and len(after) == 14 and set(after.schemes.values()) == {static}
    files = tensors(ministral)
    for name in after:
        weight, _, input_scale = after[name]
        assert torch.equal(weight.dequantize(torch.bfloat16), theirs[f"{name}.weight"])
        assert torch.equal(input_scale, files[f"{before.layers[name].prefix}activation_scale"].reshape(1))
    code, error = run(capsys, "export", ministral, "-o", tmp_path / "bf16", "--format", "bf16")
    assert code == 0, error
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "bf16", dtype="auto").state_dict()
    assert plain.keys() == theirs.keys() and all(torch.equal(plain[name], theirs[name]) for name in plain)
    code, error = run(capsys, "quantize", ministral, "-o", tmp_path / "w4", "--from-quantized", "--scheme", "rtn")
    assert code == 0, error
    assert run(capsys, "check", tmp_path / "bf16", "--scheme", "rtn")[0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_scheme": "dynamic"}, "'.*activation_scale' does not belong"),
        ({"activation_scheme": "per-tensor"}, 'activation_scheme: "per-tensor"'),
        ({"weight_block_size": [128, 128]}, "FP8 blocks need two sides and dynamic activations"),
        ({"fmt": "e5m2"}, 'fmt: "e5m2"'),
    ],
)
def test_another_config_for_its_tensors_is_refused(ministral, tmp_path, change, message):
    shutil.copytree(ministral, tmp_path / "model")
    block_of(tmp_path / "model", **change)
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "model", tmp_path / "out", "compressed-tensors")


def test_two_names_of_one_scale_are_refused(ministral, tmp_path):
    shutil.copytree(ministral, tmp_path / "model")
    weights = tensors(ministral)
    name = next(name for name in weights if name.endswith("weight_scale_inv"))
    save_file(weights | {name.removesuffix("_inv"): weights[name].clone()}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match="are two names of the same tensor"):
        Stored.of(tmp_path / "model")
