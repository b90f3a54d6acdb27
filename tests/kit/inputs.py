"""Model inputs from images and a question, through chat template and processor."""

from __future__ import annotations

import torch
from PIL import Image

from vlmcompress.models import VLM

QUESTION = "what?"


def images(count: int) -> list[Image.Image]:
    """`count` one-coloured images of 80x60, each of another colour."""
    return [Image.new("RGB", (80, 60), (90 * index, 20, 30)) for index in range(count)]


def encode(vlm: VLM, count: int) -> dict[str, torch.Tensor]:
    """Inputs of a prompt with `count` images; `input_ids` is [1, tokens]."""
    content = [{"type": "image"}] * count + [{"type": "text", "text": QUESTION}]
    text = vlm.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    batch = vlm.processor(text=[text], images=images(count), return_tensors="pt")
    dtype = vlm.model.dtype
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
