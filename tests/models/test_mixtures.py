"""Mixtures of experts from whatever layout they are stored in to checkpoints that have their experts one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.inputs import encode
from vlmcompress import models
from vlmcompress.evaluation.doctor.files import diagnose
from vlmcompress.export.formats.compressed_tensors import group_of
from vlmcompress.export.stored import Stored
from vlmcompress.quantization.plan import make_plan
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.tensor_files import read_tensor

MIXTURES = ("qwen3-vl-moe", "qwen3-5-moe", "glm4v-moe", "gemma4-moe")


def recipe(model: Path, **keys):
    return resolve({"model": str(model), "scheme": "rtn", **keys}).recipe


@pytest.mark.representatives
@pytest.mark.parametrize("mixture", MIXTURES)
def test_all_layouts_give_the_same_checkpoint(mixture, checkpoint, tmp_path):
    """As published, as transformers saves it, and one by one: the same bytes, as many as planned, nothing to complain of."""
    sources = [checkpoint(mixture), checkpoint(mixture, False)]
    if models.REGISTRY.get(
        mixture
    ).SPEC.images.grid:  # others carry no reducer, and a checkpoint has to carry something
        _plain(sources[0], tmp_path / "plain")
    outs = [tmp_path / str(index) for index in range(2)]
    for source, out in zip(sources, outs, strict=False):
        planned = make_plan(recipe(source, out=out))
        quantize(planned.recipe)
        assert planned.bytes_after == sum(entry.spec.nbytes for entry in models.stored_tensors(out).values())
        assert all(finding.ok for finding in diagnose(out, source))
    first, second = (load_file(out / "model.safetensors") for out in outs)
    heads = models.mtp_tensors(models.REGISTRY.get(mixture).SPEC, first)  # transformers saves none
    assert first.keys() - second.keys() == set(heads) and not second.keys() - first.keys()
    assert all(value.equal(first[name]) for name, value in second.items())
    _computes(outs[0], sources[0])


def _plain(source: Path, out: Path) -> None:
    """Written unquantized, experts stand one by one, with their values."""
    quantize(recipe(source, out=out, scheme="none", reduce="uniform:1.0", engine="transformers"))
    expected = {name: read_tensor(entry) for name, entry in models.stored_tensors(source).items()}
    written = models.stored_tensors(out)
    assert set(written) == set(expected) and any(".experts.3.down_proj.weight" in name for name in written)
    assert all(torch.equal(read_tensor(entry), expected[name]) for name, entry in written.items())
    assert json.loads((out / "config.json").read_text())["text_config"].get("norm_topk_prob", True)


def _computes(out: Path, source: Path) -> None:
    """Opened in transformers the checkpoint computes what its source does with dequantized weights."""
    model, info = models.open_model(out, dtype="auto")
    assert not any(info.values())
    vlm, stored = models.load(source), Stored.of(out)
    routers = [name for name, _ in vlm.model.named_modules() if name.endswith((".mlp.gate", ".router.proj"))]
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    assert routers and not any(
        group_of(block, alias) for name in routers for alias in (name, vlm.spec.engine_name(name))
    )
    for name in stored:
        weight = stored[name][0].dequantize(torch.bfloat16)
        vlm.model.get_submodule(name).weight = torch.nn.Parameter(weight, requires_grad=False)
    batch = encode(vlm, 2)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, vlm.model(**batch).logits)


def test_experts_of_a_block_are_planned_as_one(checkpoint):
    source = checkpoint("qwen3-5-moe")
    survey = make_plan(recipe(source, bits={"budget": 5}), strict=False)
    assert survey.budget and {key for key in survey.budget.sizes if key[0] == 0} == {
        (0, name) for name in ("gdn_in", "gdn_out", "shared_expert.gate_up", "shared_expert.down", "experts")
    }
    sides = 4 * 3 * 128 * 128
    assert survey.budget.sizes[0, "experts"]["8"] - survey.budget.sizes[0, "experts"]["4"] == sides // 2
    rows = {row.group: (row.blocks, row.experts) for row in survey.rows if row.part == "decoder"}
    assert rows["experts.gate_up"] == (2, 4) and rows["shared_expert.gate_up"] == (2, 0)


def test_options_that_experts_lack_are_refused_in_one_line(checkpoint):
    source = checkpoint("qwen3-5-moe")
    (problem,) = make_plan(
        recipe(source, skip=["mlp.experts.2.down_proj"]), strict=False
    ).problems  # one for all blocks
    assert "not all experts of block 0" in problem and "\n" not in problem
    assert not make_plan(recipe(source, skip=["layers.0.mlp.experts."]), strict=False).problems
    (problem,) = make_plan(recipe(source, target="cpu"), strict=False).problems
    assert "AMX" in problem and "\n" not in problem
    assert not make_plan(recipe(source, target="cpu", skip=["mlp.experts."]), strict=False).problems
    assert not make_plan(recipe(source, target="h100"), strict=False).problems
    (problem,) = make_plan(
        recipe(source, target="h100", options={"bits": 8, "symmetric": False}), strict=False
    ).problems
    assert "experts of 8 bits with symmetric weights only" in problem
