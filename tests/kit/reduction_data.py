"""Tiny models in float64 with large random weights, so that a wrong position or mask shows, and batches of prompts."""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.kit.tiny import build
from vlmcompress.models import VLM, load

LAYERS = 3
QUESTION = "what colour is it?"


@functools.cache
def checkpoint(family: str) -> Path:
    """The family's tiny model on disk, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(family, folder / family)


@functools.cache
def vlm(family: str) -> VLM:
    """The same, loaded."""
    return load(checkpoint(family))


@functools.cache
def tiny(family: str, mixed: bool = False) -> VLM:
    """The family's tiny model with three decoder blocks; its weights stay as they are.

    `mixed`: with other blocks than attention, where the family has them.
    """
    with tempfile.TemporaryDirectory() as folder:
        vlm = load(build(family, folder))
    config = copy.deepcopy(vlm.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = LAYERS
    kinds = getattr(text, "layer_types", None)
    if kinds and mixed:
        text.layer_types = (kinds * LAYERS)[:LAYERS]
    elif kinds:
        text.layer_types = ["full_attention"] * LAYERS
        if "sliding_attention" in kinds:
            text.layer_types[0], text.sliding_window = "sliding_attention", 500
    return _built(vlm, config)


@functools.cache
def wide(family: str) -> VLM:
    """The same of a family whose tokens are blocks of patches, with pictures of 8x8 patches: 16 tokens of 2x2 patches each."""
    vlm = tiny(family)
    config, processor = copy.deepcopy(vlm.model.config), copy.deepcopy(vlm.processor)
    vision, images = config.vision_config, processor.image_processor
    vision.image_size = [112, 112] if isinstance(vision.image_size, list) else 112
    for settings, name in ((config, "image_seq_length"), (config, "mm_tokens_per_image")):
        if hasattr(settings, name):
            setattr(settings, name, 16)
    if family == "idefics3":
        images.size, images.max_image_size = {"longest_edge": 224}, {"longest_edge": 112}
        processor.image_seq_len = 16
    else:
        images.size = {"height": 112, "width": 112}
        processor.image_seq_length = 16
    if family == "gemma3":
        token = processor.tokenizer.image_token
        processor.full_image_sequence = processor.full_image_sequence.replace(token * 4, token * 16)
    return _built(VLM(vlm.model, processor, vlm.spec, vlm.path), config)


def _built(vlm: VLM, config: Any) -> VLM:
    """A model of this config with large random weights, and the rest of `vlm`."""
    torch.manual_seed(1)
    model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").double().eval()
    model.requires_grad_(False)
    if vlm.spec.experts:
        model.set_experts_implementation("eager")  # the others take no float64
    for name, weight in model.named_parameters():
        if (weight.ndim == 2 or ".experts." in name) and "embed" not in name and "lm_head" not in name:
            weight.mul_(5)
    model.get_input_embeddings().weight.mul_(30)
    model.generation_config.pad_token_id = 257
    vlm.processor.tokenizer.padding_side = "left"
    return VLM(model, vlm.processor, vlm.spec, vlm.path)


def picture(seed: int, size: tuple[int, int] = (84, 84)) -> Image.Image:
    """Noise, so that no two tokens are alike."""
    noise = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.byte().numpy())


ONE = ([picture(0)], QUESTION)
TWO = ([picture(1, (140, 84)), picture(2, (84, 112))], "which of the two is the larger one?")
NONE: tuple[list[Image.Image], str] = ([], "hello there")


def encode(vlm: VLM, *prompts: tuple[list[Image.Image], str], side: str = "left") -> dict[str, torch.Tensor]:
    """Inputs of a batch, padded on one side. The images of a prompt come before its text, with a word between."""
    texts, images = [], []
    for pictures, question in prompts:
        parts = [part for _ in pictures for part in ({"type": "image"}, {"type": "text", "text": "x"})]
        content = [*parts, {"type": "text", "text": question}]
        texts.append(
            vlm.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        )
        images.append(pictures)
    kwargs: Any = {"images": images} if any(images) else {}
    batch = vlm.processor(text=texts, padding=True, padding_side=side, return_tensors="pt", **kwargs)
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
