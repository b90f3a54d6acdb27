"""Tiny float32 models with no parameter that is the same everywhere, and questions about small images, to compare engines."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.kit.tiny import build
from vlmcompress.engines import EngineSettings, Request

SETTINGS = EngineSettings(max_tokens=8, logprobs=8, dtype="float32", max_num_seqs=1)


def floats(family: str, folder: Path, **text: Any) -> Path:
    """Write a tiny float32 checkpoint whose norms and biases vary, so that each parameter has to be in its place.

    Args:
        text: see `tests.kit.tiny.build`.
    """
    build(family, folder, **text)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if tensor.shape == (1,):
            tensors[name] = tensor * (0.5 + torch.rand(1, generator=generator))
        elif tensor.numel() > 1 and tensor.std() == 0:
            tensors[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
        elif tensor.ndim > 1:
            tensors[name] = tensor * 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(_as_float32(config)))
    return folder


def _as_float32(config: dict) -> dict:
    changed = {key: _as_float32(value) if isinstance(value, dict) else value for key, value in config.items()}
    return changed | ({"dtype": "float32"} if "dtype" in config else {})


def edit(folder: Path, file: str, **entries: Any) -> None:
    """Change entries of a JSON file; an entry that is a mapping is changed entry by entry."""
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(_merged(content, entries)))


def _merged(content: dict, entries: dict) -> dict:
    changes = {
        key: _merged(content.get(key) or {}, value) if isinstance(value, dict) else value
        for key, value in entries.items()
    }
    return content | changes


def questions(
    media: Path, sizes: Sequence[tuple[int, int]], count: int | None = None, prelude: str = ""
) -> list[Request]:
    """Questions about `count` pictures (None: two of each size), which are written into `media`, and one without, each after
    a prelude."""
    noise, requests = random.Random(0), []
    for index in range(2 * len(sizes) if count is None else count):
        size = sizes[index % len(sizes)]
        small = Image.frombytes("RGB", (8, 8), noise.randbytes(192))
        small.resize(size, Image.Resampling.BICUBIC).save(media / f"{index}.png")
        image = {"type": "image_url", "image_url": {"url": (media / f"{index}.png").as_uri()}}
        text = {"type": "text", "text": f"{prelude}What is number {index}?"}
        requests.append(Request(str(index), [{"role": "user", "content": [image, text]}]))
    return [*requests, Request("text", [{"role": "user", "content": f"{prelude}Hello there."}])]


def job(folder: Path, media: Path, reduce: str | None = None) -> dict[str, Any]:
    """The settings of an engine's process."""
    return {"model": str(folder), "media": str(media), "settings": vars(SETTINGS), "reduce": reduce}


def answers(engine: Any, folder: Path, media: Path, requests: Sequence[Request], reduce: str | None = None) -> dict:
    """The answers of an engine's module in this process, by request; each is a mapping or an exception."""
    settings = job(folder, media, reduce)
    running, _ = engine.start(settings)
    return dict(engine.answers(running, [vars(request) for request in requests], settings))
