"""Layouts against the real processors' placeholders, and against what a change of pixels changes in the features."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from PIL import Image
from torch import nn

from tests.kit.inputs import QUESTION
from vlmcompress.models import VLM

SIZES = [(80, 60), (60, 80), (56, 56), (57, 55), (200, 40), (31, 190), (300, 300), (113, 112), (1, 40), (151, 97)]
SQUARE = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ANYRES = [[384 * row, 384 * column] for row in range(1, 7) for column in range(1, 7)]
# Settings of released models: of the image processor, of the processor; visual tokens of some image sizes.
REAL: dict[str, tuple[dict, dict, dict]] = {
    "llava": ({"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}, {}, {(640, 480): 576}),
    "llava-next": (
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}, "image_grid_pinpoints": SQUARE},
        {},
        {(672, 672): 576 + 48 * 48 + 48, (1024, 768): 576 + 36 * 48 + 36},
    ),
    "granite4-vision": (
        {"size": {"shortest_edge": 384}, "crop_size": {"height": 384, "width": 384}, "image_grid_pinpoints": ANYRES},
        {"patch_size": 16, "downsample_rate": "4/8"},
        {(384, 384): 144 + 144 + 12, (1024, 768): 144 + 24 * 32 + 24},
    ),
    "llava-onevision": (
        {"size": {"height": 384, "width": 384}, "image_grid_pinpoints": ANYRES},
        {"num_image_tokens": 729},
        {(384, 384): 729 + 729 + 27, (1024, 768): 729 + 54 * 73 + 54, (2304, 2304): 729 + 81 * 81 + 81},
    ),
    "qwen2-vl": (
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        {},
        {(1024, 768): 27 * 37, (28, 28): 4},
    ),
    "qwen2-5-vl": ({"size": {"shortest_edge": 3136, "longest_edge": 12845056}}, {}, {(644, 392): 14 * 23}),
    "qwen3-vl": ({"size": {"shortest_edge": 65536, "longest_edge": 16777216}}, {}, {(1024, 768): 24 * 32}),
    "idefics3": (
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
        {"image_seq_len": 169},
        {(1024, 768): 169 * 13},
    ),
    "internvl": (
        {"size": {"height": 448, "width": 448}, "max_patches": 12},
        {"image_seq_length": 256},
        {(1024, 768): 256 * 13, (448, 448): 256},
    ),
    "lfm2-vl": (
        {"tile_size": 512, "max_tiles": 10, "min_image_tokens": 64, "max_image_tokens": 256},
        {},
        {(512, 512): 256, (1024, 768): 256 * 6 + 13 * 18},
    ),
    "gemma4": ({"max_soft_tokens": 280, "patch_size": 16}, {}, {(1024, 768): 14 * 19}),
    "glm4v": (
        {"size": {"shortest_edge": 12544, "longest_edge": 9633792}},
        {},
        {(1024, 768): 27 * 37, (4000, 3000): 67 * 90},
    ),
    "mistral3": ({"size": {"longest_edge": 1540}}, {}, {(1024, 768): 37 * 28, (3080, 1540): 55 * 28}),
}


def prompt(vlm: VLM, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Model inputs of a prompt with these images."""
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": QUESTION}]
    text = vlm.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return dict(vlm.processor(text=[text], images=[images], return_tensors="pt"))


def alone(vlm: VLM) -> VLM:
    """A copy whose encoder and projector do not attend, so that each token depends on what it shows and nothing else."""
    model = copy.deepcopy(vlm.model).float()
    for name in vlm.spec.projector:
        for parameter in model.get_submodule(name).parameters():
            if not parameter.any():  # Gemma's projection starts as zeros
                parameter.normal_()
    ends = ("attn.proj", "attn.out_proj", "attn.o_proj.linear", "attention.o_proj", "attention.projection_layer")
    ends += ("attention.output.dense",)  # a Q-Former's
    for part in (vlm.spec.vision[0], *vlm.spec.projector):
        for name, module in model.get_submodule(part).named_modules():
            if isinstance(module, nn.Linear) and name.endswith(ends):
                module.weight.zero_()
                if module.bias is not None:
                    module.bias.zero_()
    return VLM(model, vlm.processor, vlm.spec, vlm.path)


def features(vlm: VLM, image: Image.Image) -> torch.Tensor:
    """`[tokens, d]`: the visual rows that the language model's first block gets."""
    inputs, rows = prompt(vlm, [image]), []
    block = vlm.model.get_submodule(f"{vlm.spec.layers}.0")
    hook = block.register_forward_pre_hook(lambda _, args: rows.append(args[0][0]))
    with torch.no_grad():
        vlm.model(**inputs)
    hook.remove()
    return rows[0][inputs["input_ids"][0] == getattr(vlm.model.config, vlm.spec.image_token)]


def placeholders(vlm: VLM, sizes: list[tuple[int, int]]) -> int:
    inputs = prompt(vlm, [Image.new("RGB", size, "gray") for size in sizes])
    return int((inputs["input_ids"] == getattr(vlm.model.config, vlm.spec.image_token)).sum())


@pytest.fixture
def vlm(loaded, family) -> VLM:
    return loaded(family)


def test_tokens_of_an_image_are_counted(vlm):
    """Of sizes at the edges of settings, and of others drawn at random."""
    draw = random.Random(vlm.spec.family)
    for size in (*SIZES, *((draw.randint(20, 400), draw.randint(20, 400)) for _ in range(25))):
        assert vlm.spec.layout(vlm.processor, *size, 1).tokens == placeholders(vlm, [size]), size


def test_tokens_of_several_images_are_counted(vlm):
    layouts = [vlm.spec.layout(vlm.processor, *size, len(SIZES[:3])) for size in SIZES[:3]]
    assert sum(layout.tokens for layout in layouts) == placeholders(vlm, SIZES[:3])


@pytest.mark.parametrize("name", REAL)
def test_settings_of_released_models(loaded, name):
    vlm = loaded(name)
    processor = copy.deepcopy(vlm.processor)
    settings, processor_settings, counts = REAL[name]
    old = vlm.processor.image_processor
    processor.image_processor = type(old)(**{**old.to_dict(), **settings})
    for key, value in processor_settings.items():
        setattr(processor, key, value)
    for size, count in counts.items():
        assert vlm.spec.layout(processor, *size, 1).tokens == count, size
        assert placeholders(VLM(vlm.model, processor, vlm.spec, vlm.path), [size]) == count, size


def test_parts_belong_together(vlm):
    for size in SIZES:
        layout = vlm.spec.layout(vlm.processor, *size, 1)
        cells = layout.cells()
        assert len(cells) == layout.tokens
        tokens = [token for _, index in layout.grids() for token in index]
        assert tokens == [token for token, cell in enumerate(cells) if cell is not None]
        for (_, rows, columns), index in layout.grids():
            assert len(index) == rows * columns
            boxes = [cells[token] for token in index]
            for first in range(0, len(boxes), columns):  # a row of one piece: same height, left to right, no gaps
                row = boxes[first : first + columns]
                assert {box[1] for box in row} == {row[0][1]}
                assert all(a[2] == pytest.approx(b[0]) for a, b in zip(row[:-1], row[1:], strict=True))


def test_a_token_shows_its_part_of_the_image_and_nothing_else(vlm):
    """Change a spot: the tokens that change are those whose parts it touches, give or take what resizing blurs."""
    vlm, draw = alone(vlm), random.Random(vlm.spec.family)
    for width, height in [(224, 168), (100, 230)]:
        noise = Image.frombytes("RGB", (width // 8, height // 8), draw.randbytes(width // 8 * (height // 8) * 3))
        before = noise.resize((width, height), Image.Resampling.BICUBIC)
        cells = vlm.spec.layout(vlm.processor, width, height, 1).cells()
        plain = features(vlm, before)
        assert len(plain) == len(cells)
        for _ in range(3):
            x, y = draw.randrange(0, width - 16), draw.randrange(0, height - 16)
            after = before.copy()
            after.paste((255, 0, 255), (x, y, x + 16, y + 16))
            off = (features(vlm, after) - plain).abs().amax(1)
            for cell, change in zip(cells, off.tolist(), strict=True):
                blur = (
                    8.0 if cell is None else max(8.0, (cell[2] - cell[0]) / 4, (cell[3] - cell[1]) / 4)
                )  # of resizing
                if cell is not None and _touch(cell, (x + 2, y + 2, x + 14, y + 14)):
                    assert change > 0, (cell, x, y)
                elif cell is None or not _touch(cell, (x - blur, y - blur, x + 16 + blur, y + 16 + blur)):
                    assert change == 0, (cell, x, y)


def _touch(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
