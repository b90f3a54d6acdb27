"""Every family through the whole pipeline: calibrate on images, quantize, write, reload."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from tests.models.inputs import QUESTION, encode, images
from vlmcompress import doctor, models, pipeline
from vlmcompress.recipe import resolve

# One scheme that smooths with calibration data and one data-free scheme with the tower: between them all linear groups.
RECIPES = {"awq": {"scheme": "awq"}, "fp8 with tower": {"scheme": "fp8", "vision": "fp8"}}


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """Calibration data: four questions, with one and with two images."""
    folder = tmp_path_factory.mktemp("samples")
    for index, image in enumerate(images(2)):
        image.save(folder / f"{index}.png")
    rows = [{"image": picked, "question": QUESTION, "answer": "red"} for picked in ("0.png", "1.png")]
    rows += [{"image": ["0.png", "1.png"], "question": QUESTION, "answer": answer} for answer in ("red", "blue")]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "samples.jsonl"


@pytest.fixture(scope="session")
def quantized(checkpoint, samples, tmp_path_factory):
    """`quantized(family, recipe)`: the folder of the quantized tiny model, made once."""
    made: dict = {}

    def get(family: str, name: str):
        if (family, name) not in made:
            out = tmp_path_factory.mktemp("quantized") / "out"
            given = {"model": str(checkpoint(family)), "out": str(out), **RECIPES[name]}
            given["calibrate"] = {"data": str(samples), "samples": 4}
            pipeline.quantize(resolve(given).recipe)
            made[family, name] = out
        return made[family, name]

    return get


@pytest.mark.parametrize("name", RECIPES)
def test_reloads_in_transformers_and_answers_alike(family, name, quantized, checkpoint, loaded):
    """No missing or unexpected key, nothing that the doctor objects to, and logits near those of the source."""
    out = quantized(family, name)
    failed = [check for check in doctor.diagnose(out, source=checkpoint(family)) if not check.ok]
    assert not failed, failed
    with models.quiet():
        model, info = transformers.AutoModelForImageTextToText.from_pretrained(
            out, dtype="auto", output_loading_info=True
        )
    assert not any(info.values()), info
    source = loaded(family)
    batch = encode(source, 1)
    with torch.no_grad():
        before, after = source.model(**batch).logits.float(), model.eval()(**batch).logits.float()
    assert torch.nn.functional.cosine_similarity(before, after, dim=-1).min() > 0.9
    assert not torch.equal(before, after)
