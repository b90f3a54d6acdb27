"""DyMU in a recipe: thresholds and counts are learnt from calibration images, and the checkpoint carries both."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.kit import tiny
from tests.kit.reduction_data import picture
from vlmcompress.checkpoint import reducer_block
from vlmcompress.compression.quantize import quantize
from vlmcompress.errors import UserError
from vlmcompress.planning import plan
from vlmcompress.recipe import resolve
from vlmcompress.reduction.carrying import attach_carried


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dymu")
    (folder / "images").mkdir()
    for seed in range(5):
        picture(seed).save(folder / "images" / f"{seed}.png")
    return {"model": str(tiny.build("llava", folder / "llava")), "scheme": "none", "reduce": "dymu:0.5"}, folder


def written(given, folder, **more):
    calib = {"calibrate": {"data": str(folder / "images")}}
    return quantize(resolve(given | calib | {"out": str(folder / "out")} | more).recipe, overwrite=True).out


def test_the_checkpoint_carries_thresholds_and_counts(given):
    given, folder = given
    out = written(given, folder)
    found = reducer_block.read(json.loads((out / "config.json").read_text()))
    assert len(found.reducer.options.thresholds) == 2 and found.count.buckets[-1] == 16
    model, processor = AutoModelForImageTextToText.from_pretrained(out), AutoProcessor.from_pretrained(out)
    inputs = processor(text="<image>what?", images=picture(9), return_tensors="pt").to(model.dtype)
    with attach_carried(model, processor, out) as attached:
        model(**inputs)
    (unit,) = attached.seen
    assert len(unit.reduction.anchor) == found.count.count(inputs["pixel_values"][0])
    again = written(
        {**given, "reduce": {"method": "dymu", "thresholds": list(found.reducer.options.thresholds)}}, folder
    )
    block = reducer_block.read(json.loads((again / "config.json").read_text()))
    assert block.count == found.count and block.reducer.options.thresholds == found.reducer.options.thresholds


def test_transformers_need_no_counts(given):
    given, folder = given
    out = written(given, folder, engine="transformers")
    found = reducer_block.read(json.loads((out / "config.json").read_text()))
    assert found.count is None and found.reducer.options.thresholds


def test_nothing_to_learn_from(given, tmp_path):
    given, _ = given
    for reduce in ("dymu:0.5", "dymu:thresholds=[0.5, 0.6]"):
        with pytest.raises(UserError, match="reducer 'dymu' needs calibration images"):
            quantize(resolve(given | {"reduce": reduce, "out": str(tmp_path / "out")}).recipe)


def test_virtual_unmerging_is_refused_before_anything_is_read(given, tmp_path):
    given, _ = given
    with pytest.raises(UserError, match="vtu is for evaluation"):
        plan.build(resolve(given | {"reduce": "dymu:0.5,vtu=true", "out": str(tmp_path / "out")}).recipe)


def test_samples_to_learn_from_are_not_run_through_the_decoder(given):
    """Nothing of it is quantized, so that neither the reducer nor a block is called for each of them."""
    given, folder = given
    labels: set[str] = set()
    work = given | {"calibrate": {"data": str(folder / "images")}, "out": str(folder / "learnt")}
    done = quantize(resolve(work).recipe, progress=lambda label, _done, _total: labels.add(label))
    assert "thresholds" in labels and not labels & {"calibrating", "reducing visual tokens"}
    assert done.manifest["calibration"]["samples"] == 5 and done.manifest["calibration"]["prefix"] is None
    assert not done.manifest["warnings"]
