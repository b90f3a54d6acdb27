"""Every kind of damage gives a failing check that names it, never an exception; a whole checkpoint passes all checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kit import rtn
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.export import manifest

pytestmark = pytest.mark.representatives

LAYER = "language_model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return build("llava", tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """An undamaged W4A16 checkpoint."""
    out = tmp_path_factory.mktemp("whole") / "out"
    rtn.write(source, out, rtn.SCHEMES["w4-asymmetric"])
    return out


@pytest.fixture
def patient(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


def failures(folder: Path, source: Path | None = None) -> dict[str, str]:
    return {check.name: check.detail for check in doctor.diagnose(folder, source) if not check.ok}


def reseal(folder: Path) -> None:
    """Record the damaged files in the manifest, so that only the deeper checks can notice."""
    path = folder / manifest.MANIFEST
    path.write_text(json.dumps(manifest.read_manifest(folder) | {"files": manifest.hash_files(folder)}))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reseal(folder)


def edit_json(folder: Path, name: str, change) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    if name != manifest.MANIFEST:
        reseal(folder)


@pytest.mark.parametrize("scheme", sorted(rtn.SCHEMES))
def test_whole_checkpoints_pass(source, tmp_path, scheme):
    rtn.write(source, tmp_path / "out", rtn.SCHEMES[scheme], kv_cache=scheme == "fp8", shard_size="500KB")
    assert failures(tmp_path / "out", source) == {}


@pytest.mark.parametrize("family", models.REGISTRY.names())
def test_whole_mixed_checkpoints_pass(tmp_path, family):
    folder = build(family, tmp_path / "source")
    rtn.write(folder, tmp_path / "out", rtn.SCHEMES["w4-symmetric"], rtn.SCHEMES["fp8"])
    assert failures(tmp_path / "out") == {}


def test_nothing_quantized_passes(source, tmp_path):
    rtn.write(source, tmp_path / "out", None)
    assert failures(tmp_path / "out", source) == {}


def test_a_flipped_bit(patient):
    path = patient / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    assert "model.safetensors" in failures(patient)["files"]


def test_missing_extra_and_changed_files(patient):
    (patient / "generation_config.json").unlink()
    (patient / "virus.py").write_text("")
    (patient / "chat_template.jinja").write_text("{{ 1 }}")
    detail = failures(patient)["files"]
    assert all(name in detail for name in ("generation_config.json", "virus.py", "chat_template.jinja"))


def test_a_truncated_shard(patient):
    path = patient / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    failed = failures(patient)
    assert "download" in failed["weights"] and "not examined" in failed["tensors"]


def test_no_weights_at_all(patient):
    (patient / "model.safetensors").unlink()
    assert failures(patient).keys() >= {"weights", "files", "tensors"}


def test_a_deleted_tensor(patient):
    edit_tensors(patient, lambda tensors: tensors.pop(f"{LAYER}.weight_scale"))
    failed = failures(patient)
    assert "self_attn.q_proj.weight_scale" in failed["tensors"] and "files" not in failed


def test_a_renamed_tensor(patient):
    def rename(tensors):
        tensors["vision_tower.vision_model.surprise.weight"] = tensors.pop("multi_modal_projector.linear_1.weight")

    edit_tensors(patient, rename)
    assert "surprise" in failures(patient)["tensors"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_bad_scale(patient, value):
    edit_tensors(patient, lambda tensors: tensors[f"{LAYER}.weight_scale"][3].fill_(value))
    assert f"{LAYER}.weight_scale" in failures(patient)["values"]


@pytest.mark.parametrize("scale", ["weight_global_scale", "input_global_scale"])
def test_fused_layers_with_global_scales_of_their_own(source, tmp_path, scale):
    """vLLM takes the largest of the three for all of them."""
    rtn.write(source, tmp_path / "out", rtn.SCHEMES["nvfp4"])
    edit_tensors(tmp_path / "out", lambda tensors: tensors[f"{LAYER}.{scale}"].mul_(1.5))
    failed = failures(tmp_path / "out")
    assert failed.keys() == {"layers"} and f"one {scale}: {LAYER}.{scale}" in failed["layers"]


def test_nan_in_float8(source, tmp_path):
    rtn.write(source, tmp_path / "out", rtn.SCHEMES["fp8"])
    edit_tensors(tmp_path / "out", lambda t: t[f"{LAYER}.weight"].view(torch.uint8)[0].fill_(0x7F))
    assert f"{LAYER}.weight" in failures(tmp_path / "out")["values"]


def test_a_cut_tensor(patient):
    def cut(tensors):
        tensors[f"{LAYER}.weight_packed"] = tensors[f"{LAYER}.weight_packed"][:, :-1].contiguous()

    edit_tensors(patient, cut)
    assert f"{LAYER}.weight_packed" in failures(patient)["layers"]


def test_a_wrong_weight_shape(patient):
    edit_tensors(patient, lambda tensors: tensors[f"{LAYER}.weight_shape"].add_(1))
    assert f"{LAYER}.weight_shape" in failures(patient)["layers"]


def test_a_plain_tensor_of_another_shape(patient):
    def cut(tensors):
        tensors["multi_modal_projector.linear_1.bias"] = torch.zeros(3).bfloat16()

    edit_tensors(patient, cut)
    assert "multi_modal_projector.linear_1.bias" in failures(patient)["tensors"]


def test_a_scheme_mismatch_among_fused_layers(patient):
    edit_json(patient, "config.json", lambda c: c["quantization_config"]["ignore"].append(r"re:.*layers\.0\..*q_proj"))
    failed = failures(patient)
    assert "q_proj: unquantized" in failed["fused"] and "tensors" in failed


def test_tensor_names_that_only_transformers_finds(patient, source, tmp_path):
    """A tower as transformers saves it: vLLM asks for `vision_model`. All else is in order but for `ignore`, made for that."""

    def rename(tensors):
        for name in [name for name in tensors if name.startswith("vision_tower.")]:
            tensors[name.replace(".vision_model.", ".")] = tensors.pop(name)

    edit_tensors(patient, rename)
    saved = build("llava", tmp_path / "saved", hub_names=False)
    for folder in (patient, saved):
        wrong = failures(folder)["names"]
        assert "'vision_tower.embeddings.class_embedding'" in wrong and "'vision_tower.vision_model.embeddings" in wrong
    assert failures(patient).keys() <= {"names", "engine"}


@pytest.mark.parametrize("family", models.REGISTRY.names())
def test_a_model_saved_by_transformers_passes(tmp_path, family):
    """Written under names that every engine finds, and read back by transformers without a missing key."""
    folder = build(family, tmp_path / "source", hub_names=False)
    rtn.write(folder, tmp_path / "out", rtn.SCHEMES["w4-symmetric"])
    assert failures(tmp_path / "out", folder) == {}
    with models.quiet_transformers():
        _, info = models.open_model(tmp_path / "out", dtype="auto")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_names_that_only_transformers_understands(patient):
    def target(config):
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["targets"] = [r"re:model\.language_model\.layers\..*proj"]

    edit_json(patient, "config.json", target)
    assert "language_model.model.layers.0" in failures(patient)["engine"]


def test_a_group_size_that_does_not_divide(patient):
    def resize(config):
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 96

    edit_json(patient, "config.json", resize)
    failed = failures(patient)
    assert failed.keys() & {"layers", "tensors"}


def test_a_format_that_contradicts_the_stored_numbers(patient):
    def relabel(config):
        config["quantization_config"]["config_groups"]["group_0"]["format"] = "int-quantized"

    edit_json(patient, "config.json", relabel)
    assert "pack-quantized" in failures(patient)["config"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model_type": "unheard-of"}'])
def test_a_damaged_config(patient, damage):
    (patient / "config.json").write_text(damage)
    assert "config" in failures(patient)


@pytest.mark.parametrize("damage", [None, "{", "[]", '{"schema_version": 1}', '{"schema_version": 2}'])
def test_a_damaged_manifest(patient, damage):
    (patient / manifest.MANIFEST).unlink()
    if damage:
        (patient / manifest.MANIFEST).write_text(damage)
    assert "manifest" in failures(patient)


def test_not_smaller(patient):
    edit_json(patient, manifest.MANIFEST, lambda content: content["size"].update(weights_before=10))
    assert "10" in failures(patient)["size"]


def test_another_source(patient, source, tmp_path):
    other = Path(shutil.copytree(source, tmp_path / "other"))
    edit = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(edit | {"x": 1}))
    assert "not the source" in failures(patient, other)["size"]


def test_no_processor_or_template(patient):
    (patient / "chat_template.jinja").unlink()
    assert "chat template" in failures(patient)["processor"]
    (patient / "tokenizer.json").unlink()
    assert "processor" in failures(patient)


def test_not_a_folder(tmp_path):
    assert not any(check.ok for folder in (tmp_path / "none", tmp_path) for check in doctor.diagnose(folder))
