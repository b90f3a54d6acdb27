"""Results of finished decoder blocks in a run's work folder, so that an interrupted run can go on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

import torch

from vlmcompress.models import Group
from vlmcompress.numerics import Format, QTensor, Scheme
from vlmcompress.quantization.calibration.solve import BlockResult, QuantMethod
from vlmcompress.utils.work_folder import WorkFolder

_SMALL = ("smoothing", "multiplied", "input_scales", "kv_ranges")


def block_name(layer: int) -> str:
    """Name of a block's file in a work folder, and in a folder of statistics."""
    return f"layer-{layer:04d}"


def save_block(work: WorkFolder, layer: int, result: BlockResult) -> None:
    """Save a block's result; it is on disk when this returns."""
    tensors: dict[str, torch.Tensor] = {}
    for kind in _SMALL:
        tensors |= {f"{kind}/{name}": tensor.clone() for name, tensor in getattr(result, kind).items()}  # may be shared
    formats = {}
    for name, quantized in result.weights.items():
        formats[name] = dataclasses.asdict(quantized.format)
        tensors[f"q/{name}"] = quantized.q.contiguous()
        tensors[f"scale/{name}"] = quantized.scale.contiguous()
        if quantized.zero_point is not None:
            tensors[f"zero_point/{name}"] = quantized.zero_point.contiguous()
        if quantized.global_scale is not None:
            tensors[f"global_scale/{name}"] = quantized.global_scale.clone()  # may be shared
    facts = {"formats": formats, "errors": result.errors, "warnings": result.warnings, "maxima": result.maxima}
    work.write(block_name(layer), tensors, {key: json.dumps(value) for key, value in facts.items()})


def load_block(work: WorkFolder, layer: int, weights: bool = True) -> BlockResult:
    """Read a finished block's result exactly as it was saved, with or without its weights (which make up its size)."""
    result = BlockResult()
    with work.opened(block_name(layer)) as file:
        metadata = file.metadata()
        keys = [key for key in file.keys() if weights or key.split("/", 1)[0] in _SMALL]  # noqa: SIM118
        tensors = {key: file.get_tensor(key) for key in keys}
        result.errors = json.loads(metadata["errors"])
        result.maxima = json.loads(metadata["maxima"])
        result.warnings = [tuple(warning) for warning in json.loads(metadata["warnings"])]
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            if kind in _SMALL:
                getattr(result, kind)[name] = tensor
        for name, format_ in json.loads(metadata["formats"]).items() if weights else ():
            q, scale, zero, shared = (
                tensors.get(f"{kind}/{name}") for kind in ("q", "scale", "zero_point", "global_scale")
            )
            assert q is not None and scale is not None
            result.weights[name] = QTensor(q, scale, zero, Format(**format_), shared)
    return result


def block_bytes(weights: Format, shape: Sequence[int]) -> int:
    """Bytes on disk that `save_block` needs for a matrix `[out, in]`: 1 per code, at most 4 per scale, 1 per zero point."""
    rows, columns = shape
    groups = -(-columns // weights.group) if weights.group > 0 else 1
    return rows * columns + rows * groups * (4 if weights.symmetric else 5)


class StoredWeights(Mapping):
    """A lazy mapping of linear layer to (weight, scheme, input scale), read from the stored blocks."""

    def __init__(self, work: WorkFolder, blocks: list[list[Group]], method: QuantMethod):
        self.work, self.method = work, method
        self.group_of = {name: group for groups in blocks for group in groups for name in group.linears}
        self._loaded: tuple[int, BlockResult] | None = None

    def __getitem__(self, name: str) -> tuple[QTensor, Scheme, torch.Tensor | None]:
        group = self.group_of[name]
        if self._loaded is None or self._loaded[0] != group.layer:
            self._loaded = (group.layer, load_block(self.work, group.layer))
        result, scheme = self._loaded[1], self.method.of(group).scheme
        assert scheme is not None  # a plan has no other groups
        return result.weights[name], scheme, result.input_scales.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.group_of)

    def __len__(self) -> int:
        return len(self.group_of)
