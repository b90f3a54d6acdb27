"""Tiny checkpoints whose gains and biases are not all alike, so that it shows where one of them is left out."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


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
