"""The written folder: bytes, names, shards, files, and what happens when writing goes wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kit import rtn
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.export import manifest
from vlmcompress.export import write as checkpoint
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.utils import model_folder, tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import read_entries

pytestmark = pytest.mark.representatives

W4 = rtn.SCHEMES["w4-symmetric"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A tiny LLaVA with a model card."""
    folder = build("llava", tmp_path_factory.mktemp("models") / "llava")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# original\n")
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "trainer_state.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"not to be copied")
    return folder


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_every_tensor_is_copied_or_replaced(source, out):
    """Oracle: the official reader. Untouched tensors are equal under their old names, the others are the exporter's."""
    parts = rtn.parts(source, W4)
    checkpoint.write(parts, out)
    expected, names = load(source), models.Source.of(source).names
    for module, values in parts.quantized.items():
        prefix = names[f"{module}.weight"].removesuffix("weight")
        del expected[f"{prefix}weight"]
        expected |= {prefix + name: tensor for name, tensor in compressed_tensors.FORMAT.tensors(*values).items()}
    got = load(out)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) and got[name].dtype == expected[name].dtype for name in got)


def test_changed_parameters_and_kv_scales(source, out):
    norm = "model.language_model.layers.0.input_layernorm.weight"
    name = models.Source.of(source).names[norm]
    value = load(source)[name] * 2
    rtn.write(source, out, W4, kv_cache=True, changed={norm: value.to(torch.float64)})  # stored as the original is
    got = load(out)
    assert got[name].dtype == value.dtype and torch.equal(got[name], value)
    assert got["language_model.model.layers.1.self_attn.k_scale"].tolist() == pytest.approx([0.02], rel=2**-8)
    assert got["language_model.model.layers.1.self_attn.v_scale"].tolist() == pytest.approx([0.03], rel=2**-8)


@pytest.mark.parametrize("family", models.REGISTRY.names())
def test_names_that_an_engine_does_not_find_are_corrected(tmp_path, family):
    """Oracle: the same model under the hub's names. What is made of it as transformers saves it is equal, name by name."""
    for kind, hub in (("hub", True), ("saved", False)):
        build(family, tmp_path / kind, hub_names=hub)
        rtn.write(
            tmp_path / kind,
            tmp_path / f"{kind}-out",
            W4,
            rtn.SCHEMES["fp8"],
            kv_cache=True,
            shard_size="300KB",
        )
    expected, got = load(tmp_path / "hub-out"), load(tmp_path / "saved-out")
    drafts = models.mtp_tensors(models.REGISTRY.get(family).SPEC, expected)  # transformers saves none
    expected = {name: value for name, value in expected.items() if name not in drafts}
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
    index = json.loads((tmp_path / "saved-out" / model_folder.INDEX).read_text())
    assert index["weight_map"].keys() == expected.keys()
    configs = [json.loads((tmp_path / f"{kind}-out" / "config.json").read_text()) for kind in ("hub", "saved")]
    assert configs[0] == configs[1] or drafts


def test_same_inputs_same_bytes(source, tmp_path):
    for name in ("a/out", "b/out"):
        rtn.write(source, tmp_path / name, W4)
    for path in sorted((tmp_path / "a/out").rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "b/out" / path.relative_to(tmp_path / "a/out")).read_bytes(), path


def test_shards(source, out):
    """Shards keep to the size, the index lists every tensor, and a sharded source gives the same tensors again."""
    rtn.write(source, out, None, shard_size="200KB")
    files = sorted(out.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        entry.name: file.name for file in files for entry in sorted(read_entries(file), key=lambda e: e.name)
    }
    assert index["metadata"]["total_size"] == sum(e.spec.nbytes for f in files for e in read_entries(f))
    for file in files:
        sizes = [entry.spec.nbytes for entry in read_entries(file)]
        assert sum(sizes) <= 200_000 or len(sizes) == 1
    whole = out.with_name("whole")
    rtn.write(out, whole, W4)
    rtn.write(source, out.with_name("direct"), W4)
    assert (whole / "model.safetensors").exists()
    ours, theirs = load(whole), load(out.with_name("direct"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_config_and_other_files(source, out):
    parts = rtn.parts(source, W4)
    checkpoint.write(parts, out)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert list(new) == [*old, "quantization_config"]
    assert new.pop("quantization_config") == compressed_tensors.FORMAT.configs(parts.layers)["config.json"]
    assert new == old
    for name in ("tokenizer.json", "chat_template.jinja", "processor_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "README.source.md").read_bytes() == (source / "README.md").read_bytes()
    assert not (out / "pytorch_model.bin").exists() and not (out / "checkpoint-10").exists()


def test_copied_bytes_survive(source, tmp_path):
    """Byte copies keep every bit of a number: signs of zeros, and numbers below the smallest normal one."""
    odd = tmp_path / "odd"
    shutil.copytree(source, odd)
    tensors = load_file(odd / "model.safetensors")
    name = "language_model.model.norm.weight"
    tensors[name] = torch.full_like(tensors[name], 0x0025, dtype=torch.int16).view(torch.bfloat16)
    tensors[name][::2] = -0.0
    save_file(tensors, odd / "model.safetensors", metadata={"format": "pt"})
    rtn.write(odd, tmp_path / "out", W4)
    assert bytes(tensor_files.to_bytes(load(tmp_path / "out")[name])) == bytes(tensor_files.to_bytes(tensors[name]))


def test_progress_ends_at_the_total(source, out):
    calls = []
    rtn.write(source, out, W4, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] == calls[0][1]


def test_quantized_source_is_refused(source, out):
    rtn.write(source, out, W4)
    whole = models.Source.of(source)
    with pytest.raises(UserError, match="quantized already"):
        checkpoint.written_config(replace(whole, path=out), {})
    assert os.listdir(out.parent) == ["out"]


def broken(tmp_path, source, monkeypatch, kind: str) -> tuple:
    """A checkpoint, further arguments of `write`, and a world in which it must fail."""
    parts, keys = rtn.parts(source, W4), dict[str, Any]()
    if kind == "full":
        real = os.pwrite

        def pwrite(file, data, position):
            if position > 500_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(file, data, position)

        monkeypatch.setattr(os, "pwrite", pwrite)
    elif kind == "known to be full":
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    elif kind == "source vanishes":
        copy = tmp_path / "copy"
        shutil.copytree(source, copy)
        parts = rtn.parts(copy, W4)
        keys["progress"] = lambda done, total: (copy / "model.safetensors").unlink(missing_ok=True)
    elif kind == "source shrinks":
        copy = tmp_path / "copy"
        shutil.copytree(source, copy)
        parts = rtn.parts(copy, W4)
        keys["progress"] = lambda done, total: os.truncate(copy / "model.safetensors", 100)
    elif kind == "bad size":
        parts = replace(parts, shard_size="5 elephants")
    return parts, keys


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("full", "no space left"),
        ("known to be full", "no space for"),
        ("source vanishes", "model.safetensors"),
        ("source shrinks", "became shorter"),
        ("bad size", "is not a size"),
    ],
)
def test_a_failure_leaves_nothing(source, tmp_path, monkeypatch, kind, message):
    work = tmp_path / "work"
    rtn.write(source, work / "out", None)
    before = manifest.hash_files(work)
    parts, keys = broken(tmp_path, source, monkeypatch, kind)
    for overwrite, out in ((True, work / "out"), (False, work / "new")):
        if kind.startswith("source"):
            shutil.rmtree(tmp_path / "copy")
            shutil.copytree(source, tmp_path / "copy")
        with pytest.raises(UserError, match=message):
            checkpoint.write(parts, out, overwrite=overwrite, **keys)
    assert manifest.hash_files(work) == before and os.listdir(work) == ["out"]


def test_a_layer_that_cannot_be_read_is_named_once(source, out):
    class Unread(dict):
        def __getitem__(self, name):
            raise UserError(f"{name}: its statistics hold NaN")

    parts = rtn.parts(source, W4)
    with pytest.raises(UserError, match=r"^\S+_proj: its statistics hold NaN$"):
        checkpoint.write(replace(parts, quantized=Unread(parts.quantized)), out)


def test_a_wrong_shape_is_an_internal_error(source, out):
    norm = "model.language_model.norm.weight"
    with pytest.raises(ValueError, match="norm.weight"):
        rtn.write(source, out, W4, changed={norm: torch.zeros(3)})
    assert not out.exists()
