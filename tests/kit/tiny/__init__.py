"""Tiny random checkpoints of every family: `build("llava", folder)` writes one that transformers and vLLM load.

Each has a tokenizer, a processor, a chat template and tensors under the names that the family's checkpoints have on the
hub. Hidden and intermediate sizes are multiples of 128 and heads are 32 wide, so that every scheme applies and vLLM's
CPU attention runs. One module per family, named like its spec in `vlmcompress.models`; each has `model()`,
`processor()` and, where published checkpoints differ from what transformers 5 saves: `RENAME` (prefix -> prefix),
`extra(model)` for tensors that transformers drops, `hub(tensors)` for others.
"""

from __future__ import annotations

import atexit
import importlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vlmcompress.models import quiet_transformers


def build(
    family: str, folder: str | Path, *, seed: int = 0, hub_names: bool = True, **text: int | tuple[int, ...]
) -> Path:
    """Write the tiny checkpoint of `family` (`qwen2-5-vl` or `qwen2_5_vl`) into `folder` and return that.

    Args:
        hub_names: tensors as on the hub; False: as transformers 5 saves them, so without those that it drops.
        text: values of the decoder's configuration, for families whose `model` takes some.
    """
    result, state = _made(family.replace("-", "_"), seed, hub_names, tuple(text.items()))
    shutil.copytree(result, folder, dirs_exist_ok=True)
    torch.set_rng_state(state)
    return Path(folder)


@cache
def _made(family: str, seed: int, hub_names: bool, text: tuple) -> tuple[Path, torch.Tensor]:
    """A checkpoint of this process, to be copied, and the state of torch's random numbers after it."""
    module, folder = importlib.import_module(f"tests.kit.tiny.{family}"), Path(tempfile.mkdtemp(prefix="tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(seed)
    with quiet_transformers():
        changes = {key: list(value) if isinstance(value, tuple) else value for key, value in text}
        model = module.model(**changes).to(torch.bfloat16).eval()
        model.save_pretrained(folder)
        module.processor().save_pretrained(folder)
    if hub_names:
        extra = module.extra(model) if hasattr(module, "extra") else {}
        _as_on_hub(folder / "model.safetensors", getattr(module, "RENAME", {}), extra)
        if hasattr(module, "hub"):
            tensors = module.hub(load_file(folder / "model.safetensors"))
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, torch.get_rng_state()


def _as_on_hub(file: Path, prefixes: dict[str, str], extra: dict[str, torch.Tensor]) -> None:
    if not prefixes and not extra:
        return
    tensors = {}
    for name, tensor in load_file(file).items():
        old = next((old for old in prefixes if name.startswith(old)), "")
        tensors[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    save_file(tensors | extra, file, metadata={"format": "pt"})
