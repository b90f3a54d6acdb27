"""What an interrupted run has already done: one safetensors file per finished decoder block.

The folder is a hidden sibling of OUT. It belongs to one *fingerprint* (source weights, recipe, calibration data,
versions, threads); with another fingerprint its contents are worthless and are removed. Files appear whole (written
aside, fsynced, renamed), so that a run killed at any moment leaves only finished blocks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vlmcompress.numerics import Format, QTensor
from vlmcompress.solve import LayerResult

_SMALL = ("smoothing", "input_scales", "kv_scales")


class LayerStore:
    """Results of finished blocks on disk.

    Args:
        folder: where they are kept; created.
        fingerprint: what the results depend on.
        resume: keep what an earlier run with the same fingerprint left; otherwise start empty.
    """

    def __init__(self, folder: Path, fingerprint: str, resume: bool):
        self.folder = folder
        mark = folder / "fingerprint"
        if folder.exists() and not (resume and mark.exists() and mark.read_text() == fingerprint):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(fingerprint)

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.safetensors"

    def has(self, layer: int) -> bool:
        """Whether the block is finished."""
        return self._path(layer).exists()

    def finished(self) -> int:
        """How many blocks are finished."""
        return sum(1 for _ in self.folder.glob("layer-*.safetensors"))

    def save(self, layer: int, result: LayerResult) -> None:
        """Keep a block's result; it is on disk when this returns."""
        tensors: dict[str, torch.Tensor] = {}
        for kind in _SMALL:
            tensors |= {
                f"{kind}/{name}": tensor.clone() for name, tensor in getattr(result, kind).items()
            }  # may be shared
        formats = {}
        for name, quantized in result.weights.items():
            formats[name] = dataclasses.asdict(quantized.format)
            tensors[f"q/{name}"] = quantized.q.contiguous()
            tensors[f"scale/{name}"] = quantized.scale.contiguous()
            if quantized.zero_point is not None:
                tensors[f"zero_point/{name}"] = quantized.zero_point.contiguous()
        path = self._path(layer)
        aside = path.with_suffix(".part")
        save_file(tensors, aside, {"formats": json.dumps(formats), "errors": json.dumps(result.errors)})
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        aside.rename(path)

    def load(self, layer: int, weights: bool = True) -> LayerResult:
        """A finished block's result, exactly as it was saved; without its weights it is small."""
        result = LayerResult()
        with safe_open(self._path(layer), "pt") as file:
            metadata = file.metadata()
            wanted = [key for key in file.keys() if weights or key.split("/", 1)[0] in _SMALL]  # noqa: SIM118
            tensors = {key: file.get_tensor(key) for key in wanted}
        result.errors = json.loads(metadata["errors"])
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            if kind in _SMALL:
                getattr(result, kind)[name] = tensor
        for name, format_ in json.loads(metadata["formats"]).items() if weights else ():
            q, scale, zero = (tensors.get(f"{kind}/{name}") for kind in ("q", "scale", "zero_point"))
            assert q is not None and scale is not None
            result.weights[name] = QTensor(q, scale, zero, Format(**format_))
        return result

    def remove(self) -> None:
        """Forget everything; called once OUT is whole."""
        shutil.rmtree(self.folder, ignore_errors=True)
