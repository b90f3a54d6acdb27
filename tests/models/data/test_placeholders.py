"""Placeholders and visual features. Oracle: the number of features that transformers' own model computes, blocks and all."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.kit.pictures import picture, refused
from vlmcompress import models
from vlmcompress.models import VLM, _requirements
from vlmcompress.models.data.encode import encode, encode_prompt, encode_usable, try_processor_and_template
from vlmcompress.models.data.samples import Sample
from vlmcompress.models.data.sources import Reading
from vlmcompress.utils.errors import UserError

pytestmark = pytest.mark.representatives


def sample(*sizes: tuple[int, int], name: str = "row 1") -> Sample:
    pictures = tuple(picture(*size, seed) for seed, size in enumerate(sizes))
    return Sample(name, pictures, "what?", "cat", origin=name)


def changed(folder: Path, to: Path, file: str = "processor_config.json", **keys) -> VLM:
    """A copy of a checkpoint with other keys in a file; None: without the key."""
    shutil.copytree(folder, to)
    content = json.loads((to / file).read_text())
    content = {key: value for key, value in (content | keys).items() if value is not None}
    (to / file).write_text(json.dumps(content))
    return models.load(to)


def test_features_are_counted_without_blocks_and_without_weights(family, loaded):
    """As many as the tokens for which the whole model feeds its decoder another embedding; it is left as it was."""
    vlm = loaded(family)
    inputs = encode_prompt(sample((90, 60), (60, 80)), vlm)
    core: Any = vlm.model.model
    decoder, embeddings = core.get_submodule(vlm.spec.layers.split(".")[1]), list[torch.Tensor]()
    hook = decoder.register_forward_pre_hook(
        lambda _, args, kw: embeddings.append(kw["inputs_embeds"]), with_kwargs=True
    )
    before = vlm.model(**inputs).logits
    hook.remove()
    expected = int((embeddings[0] != vlm.model.get_input_embeddings()(inputs["input_ids"])).any(-1).sum())
    assert models.visual_features(vlm, inputs) == expected > 0
    assert torch.equal(vlm.model(**inputs).logits, before)
    meta = dataclasses.replace(vlm, model=models.build_meta_model(vlm.path))
    assert models.visual_features(meta, inputs) == expected
    assert all(tensor.is_meta for tensor in meta.model.parameters())
    assert models.wrong_settings(vlm) is None


WRONG = [
    ("llava", {"num_additional_image_tokens": None}, "set num_additional_image_tokens to 1 (it is 0)"),
    (
        "llava",
        {"vision_feature_select_strategy": "full"},
        'set vision_feature_select_strategy to "default" (it is "full")',
    ),
    ("llava", {"patch_size": None}, "set patch_size to 14 (it is missing)"),
    ("llava-next", {"num_additional_image_tokens": None}, "set num_additional_image_tokens to 1 (it is 0)"),
    ("llava-onevision", {"num_image_tokens": 9}, "set num_image_tokens to 16 (it is 9)"),
    ("gemma3", {"image_seq_length": 7}, "set image_seq_length to 4 (it is 7)"),
    ("internvl", {"image_seq_length": 3}, "set image_seq_length to 4 (it is 3)"),
    ("idefics3", {"image_seq_len": 3}, "set image_seq_len to 4 (it is 3)"),
    ("mistral3", {"spatial_merge_size": 1}, "set spatial_merge_size to 2 (it is 1)"),
]


@pytest.mark.parametrize(
    ("kind", "keys", "message"), WRONG, ids=[f"{name}-{next(iter(keys))}" for name, keys, _ in WRONG]
)
def test_settings_that_config_json_contradicts(checkpoint, tmp_path, kind, keys, message):
    """The message names the sample, both numbers, the key with its value, and the file."""
    vlm = changed(checkpoint(kind), tmp_path / "model", **keys)
    why = "refuses it" if "patch_size" in keys else "placeholder tokens for"
    refused(lambda: encode([sample((130, 90))], vlm), "row 1: ", why, f"in processor_config.json {message}")
    refused(lambda: try_processor_and_template(vlm), "a test image: ", message)


def test_a_wrong_image_token(checkpoint, tmp_path):
    vlm = changed(checkpoint("llava"), tmp_path / "model", "config.json", image_token_index=100)
    refused(
        lambda: encode([sample((60, 40))], vlm), "0 placeholder tokens for 1 images", "set image_token_index to 259"
    )


def test_ids_beyond_the_embedding(checkpoint, loaded, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llava"), folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {key: value + 10**6 for key, value in content["model"]["vocab"].items()}
    file.write_text(json.dumps(content))
    vlm = dataclasses.replace(loaded("llava"), processor=models.load_processor(folder))
    refused(lambda: encode([sample((60, 40))], vlm), "row 1: the tokenizer gives id 1000", "embedding has 384 rows")


@pytest.mark.parametrize("value", [10**9, -14])
def test_every_number_of_a_processor_has_bounds(checkpoint, family, tmp_path, value):
    """A processor builds images and prompts of whatever size its files say: 10^9 additional tokens of an image are 20 GB."""
    folder = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    file = folder / "processor_config.json"
    content = json.loads(file.read_text())

    def owners(part: dict) -> Iterator[tuple[dict, str]]:
        for key, inner in part.items():
            if isinstance(inner, dict):
                yield from owners(inner)
            elif type(inner) is int:
                yield part, key

    for owner, key in list(owners(content)):
        before, owner[key] = owner[key], value
        file.write_text(json.dumps(content))
        with pytest.raises(
            UserError, match=f"processor_config.json: .*{key} is {value:,}, .*possible here; restore it"
        ):
            models.load_processor(folder)
        owner[key] = before


def test_bounds_leave_room_for_the_largest_models(tmp_path):
    """Sizes of models of 400 to 1000 billion weights, and of the largest encoders."""
    text = {
        "num_hidden_layers": 126,
        "hidden_size": 18432,
        "vocab_size": 262208,
        "num_experts": 512,
        "rope_theta": 1e12,
    }
    vision = {"depth": 48, "image_size": [1792, 1792], "patch_size": 14}
    _requirements.require_sizes({"text_config": text, "vision_config": vision, "vision_feature_layer": -2}, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "max_pixels": 16777216})
    )
    _requirements.require_processor_sizes(tmp_path)


VALUES = st.sampled_from(
    [0, -1, -14, 99, 10**9, 1e30, 0.5, "x", None, True, [], {}, [1, 2, 3, 4, 5], {"height": 0, "width": 0}]
)
FIELDS = st.sampled_from(["patch_size", "image_token", "num_additional_image_tokens", "vision_feature_select_strategy"])
OF_IMAGES = st.sampled_from(["resample", "rescale_factor", "size", "crop_size", "image_mean", "image_std", "do_resize"])


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(FIELDS | OF_IMAGES, VALUES)
def test_any_setting_of_a_processor_is_used_or_refused_in_a_line(loaded, checkpoint, tmp_path_factory, name, value):
    """A property: whatever stands in a field of its file, an image is encoded, or there is a `UserError`."""
    vlm, folder = loaded("llava"), tmp_path_factory.getbasetemp() / "hostile"
    shutil.copytree(checkpoint("llava"), folder, dirs_exist_ok=True)
    content = json.loads((folder / "processor_config.json").read_text())
    (content if name in content else content["image_processor"])[name] = value
    (folder / "processor_config.json").write_text(json.dumps(content))
    try:
        encode([sample((60, 40))], dataclasses.replace(vlm, processor=models.load_processor(folder)))
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(("kind", "size"), [("mistral3", (28, 28)), ("lfm2-vl", (900, 3)), ("lfm2-vl", (640, 10))])
def test_images_that_a_model_cannot_take(loaded, kind, size):
    """They are named, skipped up to a share, and refused beyond. Oracle: the model raises for them."""
    vlm, odd = loaded(kind), Sample("odd", (Image.new("RGB", size),), "what?", "cat", origin="row 7")
    refused(lambda: encode([odd], vlm), "row 7: the model cannot take its image (", "); drop it")
    with pytest.raises(RuntimeError):
        inputs = encode_prompt(sample((90, 60)), vlm) | {}
        processed = vlm.processor(text=vlm.processor.image_token, images=[[odd.images[0]]], return_tensors="pt")
        vlm.model(**(inputs | {key: value for key, value in processed.items() if isinstance(value, torch.Tensor)}))
    fine = [sample((90, 60), name=f"row {number}") for number in range(19)]
    usable = encode_usable([*fine[:7], odd, *fine[7:]], vlm, "data.jsonl")
    assert usable.numbers == [number for number in range(20) if number != 7] and list(usable.skipped) == ["row 7"]
    assert len(usable.samples) == 19
    few = [odd, dataclasses.replace(odd, origin="row 8"), *fine[:6]]
    refused(
        lambda: encode_usable(few, vlm, "data.jsonl"), "data.jsonl: 2 of 8 samples cannot be used: row 7, row 8: the"
    )
    assert len(encode_usable(few, vlm, "data.jsonl", reading=Reading(skip_bad=2)).samples) == 6


def test_samples_that_are_too_long_are_skipped_like_others(loaded):
    vlm = loaded("llava")
    long = Sample("long", (), "x" * 3000, "y", origin="row 3")
    usable = encode_usable([long, *[sample((60, 40), name=f"row {number}") for number in range(9)]], vlm, "data")
    assert list(usable.skipped) == ["row 3"] and "context of 2048" in usable.skipped["row 3"]
