"""Tiny random checkpoints of every family: `build("llava", folder)` writes one that transformers and vLLM load.

Each has a tokenizer, a processor, a chat template and tensors under the names that the family's checkpoints have on the
hub. Hidden and intermediate sizes are multiples of 128 and heads are 32 wide, so that every scheme applies and vLLM's
CPU attention runs. One module per family, named like its spec in `vlmcompress.models`; each has `model()`,
`processor()` and, where transformers 5 saves other names than the hub has, `RENAME` (prefix -> prefix), or other tensors,
`hub(tensors)`.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vlmcompress.models import quiet


def build(family: str, folder: str | Path, *, seed: int = 0, hub_names: bool = True) -> Path:
    """Write the tiny checkpoint of `family` (`qwen2-5-vl` or `qwen2_5_vl`) into `folder` and return that.

    Args:
        hub_names: tensor names as on the hub; False: as transformers 5 saves them.
    """
    module = importlib.import_module(f"tests.kit.tiny.{family.replace('-', '_')}")
    folder = Path(folder)
    torch.manual_seed(seed)
    with quiet():
        model = module.model().to(torch.bfloat16).eval()
        model.save_pretrained(folder)
        module.processor().save_pretrained(folder)
    if hub_names:
        _rename(folder / "model.safetensors", getattr(module, "RENAME", {}))
        if hasattr(module, "hub"):
            tensors = module.hub(load_file(folder / "model.safetensors"))
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _rename(file: Path, prefixes: dict[str, str]) -> None:
    if not prefixes:
        return
    tensors = {}
    for name, tensor in load_file(file).items():
        old = next((old for old in prefixes if name.startswith(old)), "")
        tensors[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
