"""`vlmcompress inspect`: what it shows is what the reducer does with the model's own features."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.kit.reduction_data import checkpoint, vlm
from vlmcompress import cli
from vlmcompress.models.data.encode import encode_prompt
from vlmcompress.models.data.samples import Sample
from vlmcompress.models.devices import float_products
from vlmcompress.reduction import methods
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks import picture
from vlmcompress.reduction.methods import Signals

pytestmark = pytest.mark.representatives


def noise(*size: int) -> Image.Image:
    """Of one seed for each size."""
    values = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(size[0]))
    return Image.fromarray(values.byte().numpy())


def looked(family: str, images: list[Image.Image], text: str) -> list[methods.Reduction]:
    model = vlm(family)
    layouts = [model.spec.layout(model.processor, *image.size, len(images)) for image in images]
    return picture.decide(model, encode_prompt(Sample("x", images, "what is it"), model), layouts, parse_reducer(text))


def features(family: str, images: list[Image.Image]) -> torch.Tensor:
    """`[tokens, d]`: the visual rows of all images that the language model gets."""
    model, rows = vlm(family), []
    inputs = encode_prompt(Sample("x", images, "what is it"), model)
    inputs["pixel_values"] = inputs["pixel_values"].to(model.model.dtype)
    text = model.model.get_submodule(model.spec.layers.rpartition(".")[0])
    hook = text.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["inputs_embeds"][0]), with_kwargs=True
    )
    with float_products(model.model):
        model.model(**inputs)
    hook.remove()
    return rows[0][inputs["input_ids"][0] == getattr(model.model.config, model.spec.image_token)]


@pytest.mark.parametrize(
    "family", ["llava", "llava-next", "llava-onevision", "qwen2-5-vl", "qwen3-vl", "internvl", "idefics3"]
)
@pytest.mark.parametrize("text", ["divprune:0.3", "uniform:0.3"])
def test_each_image_as_the_method_decides_on_its_features(family, text):
    images, chosen = [noise(112, 84), noise(90, 150)], parse_reducer(text)
    rows, model = features(family, images), vlm(family)
    for image, decision in zip(images, looked(family, images, text), strict=True):
        layout = model.spec.layout(model.processor, *image.size, len(images))
        image_rows, rows = rows[: layout.tokens], rows[layout.tokens :]
        kept = {number for number, cell in enumerate(layout.cells()) if cell is None}  # newlines stay
        for grid, index in layout.grids():
            part = methods.reduce(chosen.reducer, Signals(grid, features=image_rows[index]))
            kept |= {index[number] for number in part.anchor.tolist()}
        assert decision.anchor.tolist() == sorted(kept)
        assert len(decision.target) == layout.tokens and (decision.target >= 0).sum() == len(kept)
    assert len(rows) == 0


def test_inspect_writes_a_picture_and_a_summary(capfd, tmp_path):
    noise(80, 60).save(tmp_path / "a.png")
    noise(200, 40).save(tmp_path / "b.jpg")
    arguments = [
        "inspect",
        str(checkpoint("qwen2-5-vl")),
        str(tmp_path / "a.png"),
        str(tmp_path / "b.jpg"),
    ]
    arguments += ["--question", "what", "-o", str(tmp_path / "new" / "out.png")]
    arguments += [part for text in ("dart:0.5", "coverage:0.5", "fastv:0.5,layer=1") for part in ("--reduce", text)]
    assert cli.main([*arguments, "--json"]) == 0
    output = capfd.readouterr()
    data = json.loads(output.out)
    assert output.err == "" and [Path(image["image"]).name for image in data["images"]] == ["a.png", "b.jpg"]
    for image in data["images"]:
        assert len(image["reduced"]) == 3
        for counts in image["reduced"].values():
            assert counts["tokens"] == image["tokens"] == counts["kept"] + counts["merged"] + counts["dropped"]
            assert counts["kept"] + counts["into"] == (image["tokens"] + 1) // 2
    with Image.open(data["file"]) as picture:
        assert picture.format == "PNG" and picture.width > 4 * 480
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["out.png"]
    assert cli.main(arguments) == 0
    text = capfd.readouterr().out
    assert "  dart:0.5           3 of 6 tokens: 3 as they are, 3 dropped\n" in text and text.endswith("new/out.png.\n")


def test_images_too_small_for_the_share(capfd, tmp_path):
    noise(60, 60).save(tmp_path / "a.png")
    arguments = [
        "inspect",
        str(checkpoint("llava")),
        str(tmp_path / "a.png"),
        str(tmp_path / "a.png"),
    ]
    assert cli.main([*arguments, "-o", str(tmp_path / "out.png"), "--reduce", "dart:0.01", "--json"]) == 0
    output = capfd.readouterr()
    assert output.err == "warning: dart:0.01: the share is less than one token of a 4x4 grid, which is kept whole\n"
    assert json.loads(output.out)["images"][0]["reduced"]["dart:0.01"]["kept"] == 16
