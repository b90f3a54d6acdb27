"""The manifest records what was done, of which files, and nothing about the machine; the card has it for people."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit import rtn
from tests.kit.edits import edited
from tests.kit.tiny import build
from vlmcompress.export import card, manifest
from vlmcompress.export import write as checkpoint
from vlmcompress.utils import identity
from vlmcompress.utils import text as text_of
from vlmcompress.utils.errors import UserError

ERRORS = {"a.q_proj": {"text": 0.001, "vision": 0.004}, "a.k_proj": {"text": 0.003, "vision": 0.002}}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """Source and output; the output's manifest has calibration data and errors."""
    folder = tmp_path_factory.mktemp("made")
    source = build("llava", folder / "llava")
    (source / "README.md").write_text("---\nlicense: 'mit'\ntags:\n- x\n---\n# original\n")
    parts = rtn.parts(source, rtn.SCHEMES["w4-symmetric"], rtn.SCHEMES["fp8"], kv_cache=True)
    record = manifest.build(
        source,
        family="llava",
        recipe={"model": str(source), "out": Path("/home/me/out"), "scheme": "rtn", "seed": 3, "options": {"bits": 4}},
        calibration={"source": "/home/me/images", "samples": 8, "tokens": {"text": 10, "vision": 90}, "share": 0.9},
        errors=ERRORS,
    )
    checkpoint.write(replace(parts, manifest=parts.manifest | record), folder / "out")
    return source, folder / "out"


def test_a_manifest_hashes_every_other_file(made):
    """Oracle: sha256sum of each file."""
    _, out = made
    files = manifest.read_manifest(out)["files"]
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert sorted([*files, manifest.MANIFEST]) == names
    for name, entry in files.items():
        done = subprocess.run(["sha256sum", out / name], capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == entry["sha256"] and (out / name).stat().st_size == entry["size"]


def test_a_manifest_records_the_run_without_paths(made):
    source, out = made
    content = manifest.read_manifest(out)
    assert content["recipe"] == {"model": "llava", "out": "out", "scheme": "rtn", "seed": 3, "options": {"bits": 4}}
    assert content["seed"] == 3 and content["errors"] == ERRORS and content["calibration"]["source"] == "images"
    assert content["created_by"].keys() >= {"vlmcompress", "torch", "transformers", "compressed-tensors"}
    assert content["model"]["config_sha256"] == hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    assert content["size"]["weights_after"] < content["size"]["weights_before"]
    text = (out / manifest.MANIFEST).read_text() + (out / card.CARD).read_text()
    assert str(source.parent) not in text and "/home" not in text


def test_the_source_is_identified_by_its_headers(made, tmp_path):
    source, _ = made
    before = identity.source_identity(source)
    assert before == identity.source_identity(source)
    other = build("llava", tmp_path / "llava")
    (other / "config.json").write_bytes((source / "config.json").read_bytes())
    assert identity.source_identity(other) == before
    (other / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"{}")
    assert identity.source_identity(other)["headers_sha256"] != before["headers_sha256"]


def test_any_changed_byte_changes_the_hash(tmp_path):
    """In one process, where hashes are kept, and although the time of last change stays; wherever the folder lies."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(bytes(8))
    (model / "report.html").write_text("not what answers depend on")
    hashes = {identity.model_hash(model)}
    for place in range(8):
        with edited(model / "model.safetensors", bytes(i == place for i in range(8))):
            hashes.add(identity.model_hash(model))
    assert len(hashes) == 9
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "report.html").unlink()
    assert identity.model_hash(tmp_path / "copy") == identity.model_hash(model)


@pytest.mark.parametrize("content", ["{", "[]", '{"x": 1}', '{"schema_version": 99}'])
def test_unreadable(tmp_path, content):
    with pytest.raises(UserError, match="has no"):
        manifest.read_manifest(tmp_path)
    (tmp_path / manifest.MANIFEST).write_text(content)
    with pytest.raises(UserError, match=manifest.MANIFEST):
        manifest.read_manifest(tmp_path)


def test_a_card_shows_how_to_serve(made):
    _, out = made
    text = (out / card.CARD).read_text()
    assert "vllm serve ./out --served-model-name out --kv-cache-dtype fp8" in text
    assert "license: mit" in text and "base_model" not in text  # a folder's name is no id
    assert "INT4 group 128" in text and "FP8 per channel" in text
    assert "text: 10, vision: 90" in text and "README.source.md" in text
    size = manifest.read_manifest(out)["size"]
    before, after = size["weights_before"], size["weights_after"]
    assert (
        f"Weights: {text_of.size(before)} before, {text_of.size(after)} after ({before / after:.2f}x smaller)." in text
    )
