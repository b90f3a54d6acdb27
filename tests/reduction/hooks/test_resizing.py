"""Images made smaller by a processor's settings: what the settings do, which is chosen, and what the checkpoint says."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.kit.families import FAMILIES
from tests.kit.inputs import QUESTION
from tests.kit.published import with_real_limits
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import Recipe
from vlmcompress.reduction.hooks import resizing
from vlmcompress.reduction.resize import Resize
from vlmcompress.utils.errors import UserError

FIXED = ("gemma3", "llava")
SIZES = [(300, 300), (400, 180), (150, 390), (90, 70)]


@pytest.fixture(params=[name for name in FAMILIES if name not in FIXED])
def vlm(request, loaded) -> VLM:
    """A model of a family whose images can be made smaller, with the room that real ones have."""
    model = loaded(request.param)
    processor = copy.deepcopy(model.processor)
    images_of = processor.image_processor
    larger = {
        "gemma4": {"max_soft_tokens": 280},
        "gemma4-moe": {"max_soft_tokens": 280},
        "gemma4-unified": {"max_soft_tokens": 280},
        "qwen2-vl": {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 100}},
        "qwen2-5-vl": {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 100}},
        "mistral3": {"size": {"longest_edge": 224}},
    }
    if request.param in ("idefics3", "smolvlm"):
        larger[request.param] = {"size": {"longest_edge": 4 * images_of.max_image_size["longest_edge"]}}
    processor.image_processor = type(images_of).from_dict(images_of.to_dict() | larger.get(request.param, {}))
    return VLM(model.model, processor, model.spec, model.path)


def tokens(vlm: VLM, sizes: list[tuple[int, int]]) -> int:
    """Visual tokens that the processor puts into a prompt with images of these sizes."""
    content = [{"type": "image"}] * len(sizes) + [{"type": "text", "text": QUESTION}]
    text = vlm.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    blank = [Image.new("RGB", size, "gray") for size in sizes]
    inputs = vlm.processor(text=[text], images=[blank], return_tensors="pt")
    return int((inputs["input_ids"] == getattr(vlm.model.config, vlm.spec.image_token)).sum())


def some(settings: list) -> list:
    """At most seven of them, the first and the last among these."""
    return [settings[round(i * (len(settings) - 1) / 6)] for i in range(7)] if len(settings) > 7 else settings


def test_settings_have_the_effect_of_their_name(vlm):
    """Oracle: the processor itself. No image has more tokens than the setting says; the last setting changes nothing."""
    settings = resizing.image_settings(vlm.spec, vlm.processor)
    assert len(settings) > 1 and [image_setting.tokens for image_setting in settings] == sorted(
        {image_setting.tokens for image_setting in settings}
    )
    for setting in some(settings):
        smaller = VLM(vlm.model, setting.applied(vlm.processor), vlm.spec, vlm.path)
        counts = [tokens(smaller, [size]) for size in SIZES]
        assert counts == [vlm.spec.layout(smaller.processor, *size, 1).tokens for size in SIZES]
        assert max(counts) <= setting.tokens
        assert all(count <= tokens(vlm, [size]) for count, size in zip(counts, SIZES, strict=True))
    assert not settings[-1].image_processor
    first = VLM(vlm.model, settings[0].applied(vlm.processor), vlm.spec, vlm.path)
    assert tokens(first, [SIZES[0]]) < tokens(vlm, [SIZES[0]])


@pytest.mark.representatives
def test_the_largest_setting_that_leaves_the_share(vlm):
    """Oracle: every setting, tried on the real processor."""
    settings = resizing.image_settings(vlm.spec, vlm.processor)
    draw = random.Random(vlm.spec.family)
    prompts = [((draw.randint(60, 400), draw.randint(60, 400)),) for _ in range(4)] + [((300, 200), (200, 100)), ()]
    with_images = [sizes for sizes in prompts if sizes]
    now = sum(tokens(vlm, list(sizes)) for sizes in with_images)
    for keep in (0.8, 0.6):
        left = {}
        for setting in settings if len(settings) < 12 else settings[:: len(settings) // 10]:
            smaller = VLM(vlm.model, setting.applied(vlm.processor), vlm.spec, vlm.path)
            left[setting.tokens] = sum(tokens(smaller, list(sizes)) for sizes in with_images)
        if min(left.values()) > keep * now:
            with pytest.raises(UserError, match="ask for a larger share"):
                resizing.settle(vlm.spec, vlm.processor, prompts, Resize(keep=keep))
            continue
        resize = resizing.settle(vlm.spec, vlm.processor, prompts, Resize(keep=keep))
        assert resize.keep == keep and resize.tokens >= max(
            token_count for token_count, count in left.items() if count <= keep * now
        )
        model = copy.copy(vlm.model)
        model.config = copy.deepcopy(model.config)  # entries follow in place, and other tests use the same model
        fewer = resizing.resized(VLM(model, vlm.processor, vlm.spec, vlm.path), resize)
        assert sum(tokens(fewer, list(sizes)) for sizes in with_images) <= keep * now
        assert resizing.settle(vlm.spec, vlm.processor, prompts, resize) == resize


@pytest.mark.representatives
def test_a_checkpoint_is_loaded_with_the_setting(vlm, tmp_path):
    """The folder's own processor makes the images smaller, and the model takes what it makes."""
    settings = resizing.image_settings(vlm.spec, vlm.processor)
    setting = settings[len(settings) // 2 if len(settings) > 2 else 0]
    for file in Path(vlm.path).iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    vlm.processor.save_pretrained(tmp_path)
    written = resizing.setting_files(tmp_path, setting)
    assert written
    for name, content in written.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(setting.changed(config)))
    reloaded = models.load(tmp_path)
    smaller = VLM(vlm.model, setting.applied(vlm.processor), vlm.spec, vlm.path)
    assert [tokens(reloaded, [size]) for size in SIZES] == [tokens(smaller, [size]) for size in SIZES]
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = reloaded.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    batch = reloaded.processor(text=[text], images=[[Image.new("RGB", SIZES[0], "gray")]], return_tensors="pt")
    batch = {
        key: tensor.to(reloaded.model.dtype) if tensor.is_floating_point() else tensor for key, tensor in batch.items()
    }
    with torch.no_grad():
        assert reloaded.model(**batch).logits.isfinite().all()


@pytest.mark.parametrize(
    ("family", "entry"), [("gemma4", "default_output_length"), ("gemma4-unified", "num_soft_tokens")]
)
def test_vllm_counts_with_the_setting(family, entry, tmp_path):
    """vLLM takes Gemma 4's budget from config.json, transformers from the processor."""
    source, out = with_real_limits(family, build(family, tmp_path / "source")), tmp_path / "out"
    quantize(Recipe.of(source, out, scheme="none", reduce="resize:tokens=140"))
    before, after = (json.loads((folder / "config.json").read_text())["vision_config"] for folder in (source, out))
    processor = json.loads((out / "processor_config.json").read_text())["image_processor"]
    assert (before[entry], processor["max_soft_tokens"]) == (280, 140)
    assert after == before | {entry: 140}


@pytest.mark.parametrize("family", FIXED)
def test_families_whose_images_have_one_size(loaded, family):
    spec = loaded(family).spec
    assert "the same number of tokens" in str(resizing.resize_problem(spec))
    with pytest.raises(UserError, match="use a reducer"):
        resizing.image_settings(spec, loaded(family).processor)


def test_older_keys_mean_the_same(tmp_path):
    """`max_pixels` of files that transformers 4 wrote would win over `size`."""
    content = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    setting = models.ImageSetting(64, {"size": {"shortest_edge": 3136, "longest_edge": 50176}})
    preprocessor = resizing.setting_files(tmp_path, setting)["preprocessor_config.json"]
    assert preprocessor == content | {"size": {"shortest_edge": 3136, "longest_edge": 50176}, "max_pixels": 50176}


def test_unsupported_settings_are_refused(loaded):
    vlm = loaded("qwen2-vl")
    least = resizing.image_settings(vlm.spec, vlm.processor)[0].tokens
    with pytest.raises(UserError, match=f"has {least} tokens an image"):
        resizing.choose_setting(vlm.spec, vlm.processor, Resize(tokens=least - 1))
    with pytest.raises(UserError, match="the data have none"):
        resizing.settle(vlm.spec, vlm.processor, [()], Resize(keep=0.5))
