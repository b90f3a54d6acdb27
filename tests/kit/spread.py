"""Tiny models whose gains and biases are not all alike, so that it shows where one of them is left out or could be scaled."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.kit import tiny
from vlmcompress import models


def spread(checkpoint: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Copy a checkpoint of one file, with noise on every vector (norms, biases, newlines), stored in `dtype`."""
    shutil.copytree(checkpoint, folder)
    draw = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        noise = 0.5 * torch.randn(tensor.shape, generator=draw) if tensor.ndim == 1 else 0.0
        tensors[name] = (tensor.float() + noise).to(dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def uneven(folder: Path) -> models.VLM:
    """A tiny LLaVA in float32, so that candidates don't tie, with norms of many sizes, so that scaling pays."""
    loaded = models.load(tiny.build("llava", folder))
    loaded.model.float()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "language_model" in name and "layernorm" in name:
                parameter.mul_(torch.exp(torch.randn_like(parameter)))
    return loaded
