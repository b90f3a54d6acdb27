"""Every family's tables of names against the real vLLM: its own model and loading, on the meta device, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.kit import rtn, vllm_answers
from tests.kit.engine import asked
from tests.kit.families import FAMILIES, can_process
from tests.kit.places import EMULATION
from vlmcompress import cli, models
from vlmcompress.engines.vllm import names as engine_names
from vlmcompress.export import manifest
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.tensor_files import read_tensor

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]
SPELLINGS = ["hub", "transformers", "memory"]


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """`FAMILY KIND` -> folder: the family in each spelling, and quantized from two of them."""
    pytest.importorskip("vllm")
    checkpoints = {}
    for family in filter(can_process, FAMILIES):
        checkpoints |= {f"{family} {kind}": checkpoint(family, kind == "hub") for kind in ("hub", "transformers")}
        checkpoints[f"{family} memory"] = in_memory_names(checkpoint(family), tmp_path_factory.mktemp("memory"))
        for kind in ("hub", "transformers"):
            source, out = checkpoints[f"{family} {kind}"], tmp_path_factory.mktemp("quantized") / "out"
            spec = models.spec_for(models.read_config(source))
            tower = rtn.SCHEMES["fp8"] if spec.vision_groups else None
            rtn.write(source, out, rtn.SCHEMES["w4-symmetric"], tower, kv_cache=spec.engine.kv_scales)
            checkpoints[f"{family} {kind} quantized"] = out
    return checkpoints


@pytest.fixture(scope="module")
def placed(folders) -> dict[str, dict]:
    """What vLLM makes of each; without AMX its CPU build has a class for quantized experts by an emulation alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(EMULATION), prepend=":")
        return engine_names.tensor_places(folders)


def in_memory_names(source: Path, folder: Path) -> Path:
    """The checkpoint with the names that its tensors have in memory."""
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    stored = models.stored_tensors(source)
    names = models.disk_names(models.build_meta_model(source), stored)
    (folder / "model.safetensors").unlink()
    save_file({memory: read_tensor(stored[disk]) for memory, disk in names.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", SPELLINGS)
def test_the_tables_find_what_vllm_finds(family, kind, folders, placed):
    """`models.unfound` names exactly the tensors that vLLM has no place for, and vLLM misses some only then.

    Fused experts are apart: vLLM reads them in the order of the hub's files, transformers may save another, we write them one
    by one.
    """
    folder, places = folders[f"{family} {kind}"], placed[f"{family} {kind}"]
    spec, meta_model = models.spec_for(models.read_config(folder)), models.build_meta_model(folder)
    names = models.disk_names(meta_model, models.tensor_headers(folder))
    fused = {name for name in places["lost"] if spec.experts and f".{spec.experts}." in name}  # written one by one
    lost = places["lost"].keys() - fused
    assert lost == models.unfound(names, spec).keys() and bool(places["missing"]) == bool(lost)


def test_modules_have_the_names_of_the_tables(family, folders, placed):
    """But for what vLLM fuses: then it is one with another last module, next to the others of the group."""
    places = placed[f"{family} hub"]["places"]
    spec = models.spec_for(models.read_config(folders[f"{family} hub"]))
    inside = f".{spec.experts}." if spec.experts else None
    for disk, listing in places.items():
        for place in listing if inside is None or inside not in disk else ():  # what experts compute: `test_experts`
            expected = spec.engine_reads(disk)
            assert place == expected or place.split(".")[:-2] == expected.split(".")[:-2], (disk, place)


@pytest.mark.parametrize("kind", ["hub", "transformers"])
def test_vllm_takes_all_of_a_quantized_checkpoint(family, kind, placed):
    places = placed[f"{family} {kind} quantized"]
    assert (places["lost"], places["missing"]) == ({}, [])


def test_a_quantized_model_of_transformers_answers(checkpoint, samples, tmp_path):
    """The whole way: saved by `save_pretrained`, quantized, answered by the engine."""
    source, out = checkpoint("llava", False), tmp_path / "out"
    keys = {"model": str(source), "out": str(out), "scheme": "awq", "vision": "fp8"}
    quantize(resolve(keys | {"calibrate": {"data": str(samples), "samples": 4}}).recipe)
    assert "vision_tower.vision_model." in " ".join(manifest.read_manifest(out)["warnings"])
    (replies,) = asked("answers", vllm_answers.jobs([out]))
    assert "error" not in replies, replies["error"]
    assert all(answer["answer"] for answer in replies["answers"])


def test_doctor_checks_names_first(checkpoint, capfd):
    """One failing check names what the engine lacks; no question is answered."""
    assert cli.main(["doctor", str(checkpoint("llava", False)), "--engine", "vllm", "--json"]) == 1
    (check,) = json.loads(capfd.readouterr().out)["checks"]
    assert check["name"] == "names" and "no place for 55 tensors, first 'vision_tower.embeddings" in check["detail"]
