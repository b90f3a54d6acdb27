"""DyMU in a recipe: thresholds and counts are learned from images, and the checkpoint carries both."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.kit import tiny
from tests.kit.reduction_data import picture
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.hooks.attaching import attach_carried
from vlmcompress.utils.errors import UserError


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dymu")
    (folder / "images").mkdir()
    for seed in range(5):
        picture(seed).save(folder / "images" / f"{seed}.png")
    return {"model": str(tiny.build("llava", folder / "llava")), "scheme": "none", "reduce": "dymu:0.5"}, folder


def written(setup, folder, **overrides):
    calib = {"calibrate": {"data": str(folder / "images")}}
    return quantize(resolve(setup | calib | {"out": str(folder / "out")} | overrides).recipe, overwrite=True).out


def test_the_checkpoint_carries_thresholds_and_counts(setup):
    setup, folder = setup
    out = written(setup, folder)
    carried = reducer_block.read_reducer(json.loads((out / "config.json").read_text()))
    assert len(carried.reducer.reducer.thresholds) == 2 and carried.count.buckets[-1] == 16
    model, processor = AutoModelForImageTextToText.from_pretrained(out), AutoProcessor.from_pretrained(out)
    inputs = processor(text="<image>what?", images=picture(9), return_tensors="pt").to(model.dtype)
    with attach_carried(model, processor, out) as attached:
        model(**inputs)
    (unit,) = attached.reduced_units
    assert len(unit.reduction.anchor) == carried.count.count(inputs["pixel_values"][0])
    again = written(
        {**setup, "reduce": {"method": "dymu", "thresholds": list(carried.reducer.reducer.thresholds)}}, folder
    )
    block = reducer_block.read_reducer(json.loads((again / "config.json").read_text()))
    assert block.count == carried.count and block.reducer.reducer.thresholds == carried.reducer.reducer.thresholds


def test_transformers_need_no_counts(setup):
    setup, folder = setup
    out = written(setup, folder, engine="transformers")
    block = reducer_block.read_reducer(json.loads((out / "config.json").read_text()))
    assert block.count is None and block.reducer.reducer.thresholds


def test_nothing_to_learn_from(setup, tmp_path):
    setup, _ = setup
    for reduce in ("dymu:0.5", "dymu:thresholds=[0.5, 0.6]"):
        with pytest.raises(UserError, match=f"reducer '{reduce.partition(':')[0]}' needs calibration images"):
            quantize(resolve(setup | {"reduce": reduce, "out": str(tmp_path / "out")}).recipe)


def test_learning_counts_does_not_run_the_decoder(setup):
    """Nothing of it is quantized, so that neither the reducer nor a block is called for each of them."""
    setup, folder = setup
    labels: set[str] = set()
    work = setup | {"calibrate": {"data": str(folder / "images")}, "out": str(folder / "learnt")}
    done = quantize(resolve(work).recipe, progress=lambda label, _done, _total: labels.add(label))
    assert "thresholds" in labels and not labels & {"calibrating", "reducing visual tokens"}
    assert done.manifest["calibration"]["samples"] == 5 and done.manifest["calibration"]["prefix"] is None
    assert not done.manifest["warnings"]
