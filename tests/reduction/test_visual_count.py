"""Visual tokens: videos as processors make them, and configs without a processor; images: `test_prompt_cost.py`."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from vlmcompress.engines.vllm.served_model import read_served_model
from vlmcompress.models import load_processor
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.visual_count import CountRule, Pictures, kept_tokens
from vlmcompress.utils.errors import UserError

SIZES = [(64, 64), (200, 90), (90, 260)]


def rule(path) -> CountRule:
    model = read_served_model(path)
    return CountRule(path, model.meta_model.config, model.pictures)


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen2-5-vl", "qwen3-vl", "llava-next", "internvl", "gemma3"])
def test_a_config_without_processor(name, checkpoint, tmp_path):
    """With the processor's file alone the counts are the same; with config.json alone those whose sizes it says are."""
    shutil.copy(checkpoint(name) / "config.json", tmp_path)
    bare = rule(tmp_path)
    assert bare.notes and "no processor" in bare.notes[0]
    full = rule(checkpoint(name))
    if name in ("llava", "llava-next", "gemma3"):
        for size in SIZES:
            assert bare.count(Pictures((size,))).tokens == full.count(Pictures((size,))).tokens
    assert bare.count(Pictures(((64, 64),))).tokens > 0


@pytest.mark.parametrize("name", ["idefics3", "lfm2-vl"])
def test_a_family_whose_processor_decides_needs_it(name, checkpoint, tmp_path):
    shutil.copy(checkpoint(name) / "config.json", tmp_path)
    with pytest.raises(UserError, match="copy preprocessor_config.json"):
        rule(tmp_path)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2-5-vl", "qwen3-vl"])
@pytest.mark.parametrize(("frames", "width", "height"), [(4, 64, 64), (6, 200, 90), (8, 90, 260)])
def test_videos_are_as_the_processor_makes_them(name, frames, width, height, checkpoint):
    """Oracle: the video processor on a blank video."""
    path = checkpoint(name)
    of = load_processor(path).video_processor
    frame = np.zeros((frames, height, width, 3), np.uint8)
    grid = of(videos=[torch.from_numpy(frame).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt")[
        "video_grid_thw"
    ][0]
    counted = rule(path).count(Pictures((), (frames, width, height)))
    assert counted.video == int(grid.prod()) // of.merge_size**2
    assert sum(counted.patches) == int(grid.prod())
    left = kept_tokens(counted, parse_reducer("divprune:0.5"), read_served_model(path).spec)
    assert left is not None and abs(left - counted.video / 2) <= 0.5
    with pytest.raises(UserError, match="takes no videos"):
        kept_tokens(counted, parse_reducer("pixelprune"), read_served_model(path).spec)


@pytest.mark.parametrize("name", ["internvl", "llava-onevision"])
def test_videos_of_tiles_are_as_the_processor_writes_them(name, checkpoint):
    """Oracle: the placeholders that the processor puts into a prompt with a blank video."""
    path = checkpoint(name)
    processor = load_processor(path)
    frames = [Image.new("RGB", (64, 64), "gray")] * 4
    text = getattr(processor, "video_token", "<video>")
    result = processor(text=[text], videos=[frames], do_sample_frames=False, return_tensors="pt")["input_ids"][0]
    token = processor.video_token_id if name == "llava-onevision" else processor.image_token_id
    counted = rule(path).count(Pictures((), (4, 64, 64)))
    assert counted.video == int((result == token).sum())
    if name == "internvl":  # 4 tokens a frame
        assert kept_tokens(counted, parse_reducer("random:0.35"), read_served_model(path).spec) == 6


def test_a_video_that_cannot_be_counted(checkpoint):
    with pytest.raises(UserError, match="videos of llava are not counted"):
        rule(checkpoint("llava")).count(Pictures((), (4, 64, 64)))
    with pytest.raises(UserError, match="larger than"):
        rule(checkpoint("qwen3-vl")).count(Pictures((), (200_000, 64, 64)))
