"""A head that drafts tokens (MTP) is carried byte for byte in every format and taken for unquantized by every reader; where
config.json and weights do not agree about it, that is said."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.kit import rtn
from tests.kit.engine import asked
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.evaluation.doctor.files import diagnose
from vlmcompress.export.convert import convert
from vlmcompress.quantization.plan.examine import examine
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.errors import UserError

KEY = "mtp_num_hidden_layers"
SCHEMES = {"awq": "w4-symmetric", "gptq": "w4-symmetric", "gptq-v2": "w4-symmetric", "modelopt": "fp8"}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return build("qwen3-5", tmp_path_factory.mktemp("source") / "qwen3-5")


@pytest.fixture(scope="module")
def written(source, tmp_path_factory) -> dict[str, Path]:
    """Format -> a quantized checkpoint."""
    folder = tmp_path_factory.mktemp("written")
    for scheme in set(SCHEMES.values()):
        rtn.write(source, folder / scheme, rtn.SCHEMES[scheme])
    folders = {name: folder / name for name in (*SCHEMES, "bf16")}
    for name, path in folders.items():
        convert(folder / SCHEMES.get(name, "fp8"), path, name)
    return folders | {"compressed-tensors": folder / "w4-symmetric"}


def head(folder: Path) -> dict[str, torch.Tensor]:
    weights = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in weights.items() if name.startswith("mtp.")}


def test_every_format_has_the_same_bytes(source, written):
    expected = head(source)
    assert len(expected) == 15  # as in published dense checkpoints
    for folder in written.values():
        stored = head(folder)
        assert stored.keys() == expected.keys()
        assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
        assert all(check.ok for check in diagnose(folder))
        (detail,) = (check.detail for check in diagnose(folder) if check.name == "draft")
        assert "15 tensors" in detail
    ignore = json.loads((written["compressed-tensors"] / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"re:^mtp.*", "re:.*mtp.*"} <= set(ignore)


def test_a_quantized_tower_alone_keeps_the_draft_head(source, tmp_path):
    quantize(resolve({"model": str(source), "out": str(tmp_path / "out"), "scheme": "none", "vision": "fp8"}).recipe)
    assert all(torch.equal(tensor, head(tmp_path / "out")[name]) for name, tensor in head(source).items())


def test_transformers_loads_a_checkpoint_with_a_draft_head(written):
    _, info = AutoModelForImageTextToText.from_pretrained(written["compressed-tensors"], output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.engine
@pytest.mark.parametrize("name", ["compressed-tensors", "awq", "gptq", "gptq-v2", "modelopt"])
def test_vllm_loads_the_draft_head_unquantized(written, name):
    """Judged by vLLM's own config classes; the same block without our entries is the control."""
    block = json.loads((written[name] / "config.json").read_text())["quantization_config"]
    names = [f"mtp.{part}" for part in ("fc", "layers.0.self_attn.qkv_proj", "layers.0.mlp.down_proj")]
    names.append("language_model.model.layers.0.mlp.down_proj")
    bare = json.loads(json.dumps(block))
    for key in ("ignore", "modules_to_not_convert", "dynamic"):
        if isinstance(bare.get(key), list):
            bare[key] = [entry for entry in bare[key] if "mtp" not in entry]
        elif key in bare:
            bare[key] = {entry: value for entry, value in bare[key].items() if "mtp" not in entry}
    ours, control = asked("naming", [{"block": layers, "names": names} for layers in (block, bare)])
    assert ours["quantized"] == [False, False, False, True]
    assert control["quantized"] == [True] * 4


def edited(source: Path, out: Path, change) -> Path:
    """A copy whose tensors and text config `change` has edited."""
    folder = Path(shutil.copytree(source, out))
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config["text_config"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def no_key(tensors, text):
    del text[KEY]


def too_many(tensors, text):
    text[KEY] = 2


def packed(tensors, text):
    tensors["mtp.layers.0.mlp.up_proj.weight"] = tensors["mtp.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_key, rf'15 tensors are of a head .* no such head; add "{KEY}": 1 to its text_config'),
        (too_many, f"of 1 blocks, but config.json says {KEY} 2; download"),
        (packed, "head that drafts tokens is quantized .'mtp.layers.0.mlp.up_proj.weight' is F8_E4M3"),
    ],
)
def test_a_draft_head_that_contradicts_the_config(source, written, change, message, tmp_path):
    bad = edited(source, tmp_path / "bad", change)
    recipe = resolve({"model": str(bad), "out": str(tmp_path / "out"), "scheme": "rtn"}).recipe
    with pytest.raises(UserError, match=message):
        quantize(recipe)
    assert not (tmp_path / "out").exists()
    assert [finding.ok for finding in examine(recipe).findings if "drafts tokens" in finding.detail] == [False]
    bad = edited(written["compressed-tensors"], tmp_path / "compressed", change)
    assert {finding.ok for finding in diagnose(bad) if finding.name == "draft"} == {False}
    with pytest.raises(UserError, match=message):
        convert(bad, tmp_path / "out", "gptq")


def test_a_missing_draft_head(source, tmp_path):
    """What transformers saves can be served without speculation: a warning, and the new config lists what is there."""
    lost = build("qwen3-5", tmp_path / "lost", hub_names=False)
    assert head(lost) == {}
    recipe = resolve({"model": str(lost), "out": str(tmp_path / "out"), "scheme": "rtn"}).recipe
    assert [finding.ok for finding in examine(recipe).findings if KEY in finding.detail] == [True]
    done = quantize(recipe)
    (warning,) = done.manifest["warnings"]
    assert warning.startswith(f"config.json says {KEY} 1, but there is no tensor mtp.*: the head")
    assert json.loads((tmp_path / "out/config.json").read_text())["text_config"][KEY] == 0
    assert all(check.ok for check in diagnose(tmp_path / "out"))
    broken = edited(tmp_path / "out", tmp_path / "broken", lambda tensors, text: text.update({KEY: 1}))
    (draft,) = (check for check in diagnose(broken) if check.name == "draft")
    assert not draft.ok and "there is no tensor mtp.*" in draft.detail


BLOCK = "model.language_model.layers.16."  # GLM-OCR's head: the decoder's next block


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint whose head is numbered on from the decoder's blocks, and quantized ones of it by format."""
    folder = tmp_path_factory.mktemp("numbered")
    folders = {name: folder / name for name in ("source", "compressed-tensors", "awq", "gptq", "modelopt")}
    build("glm-ocr", folders["source"], num_hidden_layers=16, num_nextn_predict_layers=1)
    rtn.write(folders["source"], folders["compressed-tensors"], rtn.SCHEMES["w4-symmetric"])
    rtn.write(folders["source"], folder / "fp8", rtn.SCHEMES["fp8"])
    for name in ("awq", "gptq"):
        convert(folders["compressed-tensors"], folders[name], name)
    convert(folder / "fp8", folders["modelopt"], "modelopt")
    return folders


def test_a_head_that_is_the_next_block(numbered):
    source = models.Source.of(numbered["source"])
    tensors = load_file(numbered["source"] / "model.safetensors")
    expected = {name for name in tensors if name.startswith(BLOCK)}
    assert len(expected) == 16 and set(models.mtp_tensors(source.spec, source.stored)) == expected
    outline = models.Source.outline(numbered["source"]).stored
    assert {name: outline[name] for name in expected} == {name: source.stored[name] for name in expected}
    for name in ("compressed-tensors", "awq", "gptq", "modelopt"):
        folder = numbered[name]
        stored = load_file(folder / "model.safetensors")
        assert all(torch.equal(stored[name], tensors[name]) for name in expected)
        assert not {name for name in stored if name.startswith(BLOCK)} - expected
        checks = diagnose(folder)
        assert all(check.ok for check in checks)
        (detail,) = (check.detail for check in checks if check.name == "draft")
        assert detail.startswith(f"{BLOCK[:-1]}, an MTP head: 16 tensors")
    folder = numbered["compressed-tensors"]
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_next_block_that_the_config_does_not_have(numbered, tmp_path):
    def without(tensors, text):
        del text["num_nextn_predict_layers"]

    bad = edited(numbered["source"], tmp_path / "bad", without)
    with pytest.raises(
        UserError, match=r"16 tensors are of a head .*layers.16.*add .num_nextn_predict_layers.: 1 to its"
    ):
        quantize(resolve({"model": str(bad), "out": str(tmp_path / "out"), "scheme": "rtn"}).recipe)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["compressed-tensors", "awq", "gptq", "modelopt"])
def test_vllm_loads_the_next_block_unquantized(numbered, name):
    block = json.loads((numbered[name] / "config.json").read_text())["quantization_config"]
    names = ["model.layers.16.self_attn.qkv_proj", "model.layers.16.mlp.down_proj", "model.layers.15.mlp.down_proj"]
    (ours,) = asked("naming", [{"block": block, "names": names}])
    assert ours["quantized"] == [False, False, True]


def test_doctor_misses_the_entries(written, tmp_path):
    """The defect that vLLM dies of (issue 53387), and the literal that SGLang looks for."""
    folder = Path(shutil.copytree(written["compressed-tensors"], tmp_path / "out"))
    config = json.loads((folder / "config.json").read_text())
    block = config["quantization_config"]
    for left, message in (([], "8 layers of the draft head .* first 'mtp.fc'"), (["re:.*mtp.*"], "has no 're:")):
        block["ignore"] = [entry for entry in block["ignore"] if "mtp" not in entry] + left
        (folder / "config.json").write_text(json.dumps(config))
        (draft,) = (check for check in diagnose(folder) if check.name == "draft")
        assert not draft.ok and re.search(message, draft.detail)


def test_families_without_a_draft_head_mention_none(tmp_path):
    source = models.Source.of(build("llava", tmp_path / "llava"))
    assert models.mtp_problem(source.spec, source.config, source.stored) is None
    assert models.missing_mtp(source.spec, source.config, source.stored) is None
    assert models.kept_mtp(source.spec, source.stored) == []
