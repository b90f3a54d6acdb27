"""Bad folders: each is refused with one line that names the file or tensor and what to do."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from vlmcompress import models
from vlmcompress.models import _requirements
from vlmcompress.models._requirements import engine_architectures
from vlmcompress.utils.errors import UserError

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path, checkpoint) -> Path:
    """A copy of the tiny LLaVA that a test may break."""
    return Path(shutil.copytree(checkpoint("llava"), tmp_path / "model"))


def refused(folder: Path, match: str, read=models.load) -> None:
    """`read(folder)` raises a `UserError` of one line that matches and has a remedy."""
    with pytest.raises(UserError, match=match) as caught:
        read(folder)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_loads_from_a_string_in_another_dtype(checkpoint):
    vlm = models.load(str(checkpoint("llava")), dtype=torch.float32)
    assert vlm.model.dtype == torch.float32 and not vlm.model.training
    assert models.load(checkpoint("llava")).model.dtype == torch.bfloat16


def test_loading_prints_nothing(checkpoint, capfd):
    models.load(checkpoint("llava"))
    assert capfd.readouterr() == ("", "")


def test_no_folder(tmp_path):
    refused(tmp_path / "nowhere", "does not exist", models.read_config)
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "is a file", models.read_config)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is empty", models.read_config)


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "no config.json", models.read_config)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_config_is_not_json(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, "config .*config.json", models.read_config)


@pytest.mark.parametrize(
    "model_type, match",
    [
        ("llama", "not a vision-language model"),
        ("llavva", "transformers .* does not know it .*did you mean 'llava'"),
        ("aria", "no file in vlmcompress/models describes it; transformers .* has it.*CONTRIBUTING.md says how"),
        ("qwen3_omni_moe", "hears and speaks next to seeing.*'qwen3_vl_moe'"),
        ("kimi_vl", "Python code in the checkpoint.*vLLM has one"),
        ("deepseek_vl_v2", "DeepSeek-OCR are Python code"),
        ("internvl_chat", "Python code in the checkpoint; take .*'internvl'"),
    ],
)
def test_unknown_model_type(folder, model_type, match):
    config = models.read_config(folder)
    config = {"model_type": model_type} if model_type == "llama" else config | {"model_type": model_type}
    with pytest.raises(UserError, match=match):
        models.spec_for(config)


def test_a_model_that_vllm_alone_has_is_called_that():
    pytest.importorskip("vllm")
    with pytest.raises(
        UserError, match=r"does not know it .*vLLM .* has architecture DotsOCRForCausalLM; it is served there"
    ):
        models.spec_for({"model_type": "dots_ocr", "architectures": ["DotsOCRForCausalLM"]})
    with pytest.raises(UserError, match="not a vision-language model; choose from") as caught:
        models.spec_for({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    assert str(caught.value).count(" gemma4,") == 1


def test_an_architecture_of_another_release_or_model(folder):
    """What vLLM has is read from its source, and so is right for whichever is installed."""
    newer = {"model_type": "qwen9_vl", "vision_config": {}, "architectures": ["Qwen9VLForConditionalGeneration"]}
    with pytest.raises(UserError, match=r"does not know it \(a newer release may\)") as caught:
        models.spec_for(newer)
    names = engine_architectures()
    assert ("has no architecture Qwen9VLForConditionalGeneration" in str(caught.value)) == bool(names)
    assert not names or {spec_architecture(spec) for spec in models.all_specs()} <= names
    edit_json(folder / "config.json", **newer)
    refused(folder, "a newer release may", lambda path: models.build_meta_model(path, supported_only=False))
    config = models.read_config(folder) | {"model_type": "llava"}
    models.spec_for(config | {"architectures": ["VlmcompressLlavaForConditionalGeneration"]})
    with pytest.raises(UserError, match="says architecture 'Qwen2VLForConditionalGeneration' and model type 'llava'"):
        models.spec_for(config | {"architectures": ["Qwen2VLForConditionalGeneration"]})
    with pytest.raises(UserError, match="LightOnOCRForConditionalGeneration is not supported: vLLM"):  # as published
        models.spec_for({"model_type": "mistral3", "architectures": ["LightOnOCRForConditionalGeneration"]})


def test_mistrals_own_format_is_named(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    refused(tmp_path, "Mistral's own format", models.read_config)


def test_a_quantized_checkpoint_without_a_quantization_config(folder):
    """Packed weights under a config without a `quantization_config`, as after a copy of the original's config.json."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    packed = {f"{name.removesuffix('weight')}weight_packed": tensors.pop(name).view(torch.int32)}
    save_file(tensors | packed, file, {"format": "pt"})
    refused(
        folder, "weight_packed.* is of a quantized layer, and config.json has no quantization_config", models.Source.of
    )


def test_models_listed_as_unsupported_are_refused(folder):
    supported = {name for spec in models.all_specs() for name in spec.model_types}
    assert not supported & set(models.UNSUPPORTED)
    assert engine_architectures().isdisjoint({MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES["glm46v"]})


def test_supported_architectures_are_read_from_transformers():
    assert dict(_requirements.transformers_classes()) == MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    assert all(_requirements.in_transformers({"model_type": name}) for name in CONFIG_MAPPING_NAMES)
    assert not _requirements.in_transformers({"model_type": "qwen2"[:-1]})


def spec_architecture(spec: models.ModelSpec) -> str:
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[spec.model_types[0]]


def test_other_configs_that_are_refused(folder):
    config = models.read_config(folder)
    for change, match in [
        ({"model_type": None}, "no model_type"),
        ({"text_config": config["text_config"] | {"num_local_experts": 8}}, "mixture-of-experts"),
    ]:
        with pytest.raises(UserError, match=match):
            models.spec_for(config | change)
    edit_json(folder / "config.json", auto_map={"AutoModel": "x.Y"})
    refused(folder, "auto_map")
    edit_json(folder / "config.json", auto_map=None, quantization_config={"quant_method": "awq"})
    refused(folder, r"is quantized already \(awq\); give the 16-bit original")


def test_invalid_config_value(folder):
    edit_json(folder / "config.json", text_config="llama")
    refused(folder, "config.json: text_config should be an object; restore it", models.build_meta_model)


def test_generation_settings_that_are_none(folder):
    file = folder / "generation_config.json"
    file.write_text("[]")
    refused(folder, "generation settings .*generation_config.json holds no JSON object")
    file.unlink()
    os.mkfifo(file)
    refused(folder, "generation_config.json is not readable JSON .*it is a device or a pipe")


def test_pickled_weights(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    refused(folder, "pickled weights.*convert", models.read_config)
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "no \\*.safetensors", models.read_config)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(folder, keep):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep])
    refused(folder, f"{WEIGHTS} (is not a complete|has .* cut short)", models.read_config)


@pytest.mark.parametrize(
    "header",
    [b"garbage", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1]}}', b'{"a": {"data_offsets": [0]}}'],
)
def test_corrupt_header(folder, header):
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    refused(folder, "bad header", models.read_config)


def test_trailing_bytes(folder):
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"\0")
    refused(folder, "its header needs", models.read_config)


def test_shards(folder):
    """A sharded checkpoint loads like the single file; a missing shard, a wrong index and no index are refused."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    half = len(tensors) // 2
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    refused(folder, "no model.safetensors.index.json", models.read_config)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert len(models.shards(folder)) == 2
    state = models.load(folder).model.state_dict()
    assert torch.equal(state["lm_head.weight"], tensors["language_model.lm_head.weight"])

    index.write_text(json.dumps({"weight_map": weight_map | {"surplus": names and next(iter(parts))}}))
    refused(folder, "'surplus'", models.read_config)
    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "../x.safetensors"}}))
    refused(folder, "outside its folder", models.read_config)
    index.write_text(json.dumps({"weight_map": []}))
    refused(folder, "no usable weight_map", models.read_config)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors is missing", models.read_config)


def edit_tensors(folder: Path, edit) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_a_float_weight_stored_as_integers(folder):
    """Of as many bytes, and so neither its shape nor its place in the file is wrong."""
    name = "language_model.model.layers.0.mlp.down_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].view(torch.int16)}))
    refused(folder, f"'{name}' .* is stored as I16, and the model's is of numbers with a fraction")


def test_missing_and_surplus_tensors(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("vision_tower.vision_model.pre_layrnorm.weight"))
    refused(folder, "lacks 1 tensors.*model.vision_tower.pre_layrnorm.weight")
    edit_tensors(folder, lambda tensors: tensors.update(extra=torch.zeros(1)))
    refused(folder, "lacks 1 tensors .*and has 1 others, first 'extra'; .*restore config.json")


def test_wrong_shape(folder):
    edit_json(
        folder / "config.json", vision_config=models.read_config(folder)["vision_config"] | {"intermediate_size": 512}
    )
    refused(folder, "vision_tower.vision_model.encoder.layers.0.mlp.fc1.* has shape .*asks for")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(folder, bad):
    name = "language_model.model.layers.1.mlp.down_proj.weight"
    edit_tensors(folder, lambda tensors: tensors[name].__setitem__((3, 5), bad))
    refused(folder, "'model.language_model.layers.1.mlp.down_proj.weight' holds NaN or infinity")


def test_large_finite_weights_pass(folder):
    """A sum that overflows is no NaN."""
    edit_tensors(folder, lambda tensors: tensors["multi_modal_projector.linear_1.weight"].fill_(3e38))
    models.load(folder)


def test_no_processor(folder):
    (folder / "processor_config.json").unlink()
    refused(folder, "processor")
    (folder / "tokenizer.json").unlink()
    refused(folder, "no usable processor")
