"""The tensors of a checkpoint that is to be written, in order, and where the bytes of each come from."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vlmcompress.common import tensor_files
from vlmcompress.common.tensor_files import Entry, Spec
from vlmcompress.errors import UserError
from vlmcompress.exporters import Writer
from vlmcompress.models import left_out
from vlmcompress.numerics import QTensor, Scheme

Quantized = tuple[QTensor, Scheme, Tensor | None]
"""A linear layer's weight, its scheme, the scale of static activations."""


@dataclass(frozen=True)
class Piece:
    """One tensor to write and where its bytes come from: a stored entry, a tensor, a function that makes one, or a part of a
    quantized layer, given as (module, local name)."""

    name: str
    spec: Spec
    origin: Entry | Tensor | Callable[[], Tensor] | tuple[str, str]


def of_original(
    entries: list[Entry],
    quantized: Mapping[str, Quantized],
    names: Mapping[str, str],
    written: Mapping[str, str],
    changed: Mapping[str, Tensor],
    kv_scales: Mapping[str, Tensor],
    exporter: Writer,
) -> list[Piece]:
    """Plan what is written in the place of each of an unquantized checkpoint's tensors; arguments as of `write.write`."""
    layers = {names[f"{module}.weight"]: module for module in quantized}
    values = {names[parameter]: value for parameter, value in changed.items()}
    if overlap := layers.keys() & values.keys():
        raise ValueError(f"both quantized and changed: {sorted(overlap)}")
    found, renamed = list[Piece](), {disk: written[memory] for memory, disk in names.items()}
    unwanted = left_out(names, [entry.name for entry in entries])
    for entry in entries:
        name = renamed.get(entry.name, entry.name)
        if name in unwanted:
            continue
        if entry.name in layers:
            module = layers.pop(entry.name)
            weight, scheme, input_scale = quantized[module]
            if tuple(weight.q.shape) != entry.spec.shape:
                raise ValueError(f"{entry.name} is {entry.spec.shape}, its quantized form {tuple(weight.q.shape)}")
            prefix = name.removesuffix("weight")
            for local, spec in exporter.specs(scheme, *weight.q.shape, Spec.of(weight.scale).dtype).items():
                found.append(Piece(prefix + local, spec, (module, local)))
        elif entry.name in values:
            value = values.pop(entry.name)
            if tuple(value.shape) != entry.spec.shape:
                raise ValueError(f"{entry.name} is {entry.spec.shape}, its new value {tuple(value.shape)}")
            stored = value.to(tensor_files.DTYPES[entry.spec.dtype])  # a config may load float32 as bfloat16
            found.append(Piece(name, entry.spec, stored))
        else:
            found.append(Piece(name, entry.spec, entry))
    if layers or values:
        raise ValueError(f"not in the source checkpoint: {sorted([*layers, *values])}")
    dtypes = {entry.name: entry.spec.dtype for entry in entries}
    for module, scales in kv_scales.items():
        prefix, sibling = _disk_prefix(module, names, written)
        stored = scales.to(tensor_files.DTYPES[dtypes[sibling]])  # transformers computes attention in the scales' type
        for local, scale in zip(exporter.KV_SCALES or (), stored.reshape(2, 1), strict=True):
            found.append(Piece(prefix + local, Spec.of(scale), scale))
    return found


def _disk_prefix(module: str, names: Mapping[str, str], written: Mapping[str, str]) -> tuple[str, str]:
    """Name to write, with the dot, of a module that has no tensor of its own, and a source's tensor below it."""
    memory, disk = next((memory, disk) for memory, disk in names.items() if memory.startswith(f"{module}."))
    return written[memory].removesuffix(memory.removeprefix(f"{module}.")), disk


def write_weights(
    tree: Path,
    pieces: list[Piece],
    limit: int,
    quantized: Mapping[str, Quantized],
    exporter: Writer,
    progress: Callable[[int, int], None] | None,
) -> int:
    """Write the weight files into the folder `tree`, with their index where there are several; return bytes of tensors.

    Args:
        limit: most bytes of a file.
        quantized: linear layer -> what the pieces that name it are made of; one layer is in memory at a time.
        progress: called with bytes written and bytes in all.

    Raises:
        UserError: a value does not fit into the format.
    """
    by_name, total = {piece.name: piece for piece in pieces}, sum(piece.spec.nbytes for piece in pieces)
    if len(by_name) < len(pieces):
        raise ValueError("two tensors of the output have the same name")
    files = tensor_files.split(((piece.name, piece.spec) for piece in pieces), limit)
    file_names = tensor_files.shard_names(len(files))
    parts = functools.lru_cache(maxsize=1)(lambda module: _made(module, quantized, exporter))
    done = 0
    for file_name, specs in zip(file_names, files, strict=True):
        header, positions = tensor_files.layout(specs)
        with (tree / file_name).open("wb") as file:
            tensor_files.write_at(file.fileno(), header, 0)
            for name in specs:
                _write_piece(by_name[name], file.fileno(), positions[name], parts)
                done += specs[name].nbytes
                if progress:
                    progress(done, total)
    if len(files) > 1:
        where = {name: file_name for file_name, specs in zip(file_names, files, strict=True) for name in specs}
        write_json(
            tree / tensor_files.INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        )
    return total


def _made(module: str, quantized: Mapping[str, Quantized], exporter: Writer) -> dict[str, Tensor]:
    try:
        return exporter.tensors(*quantized[module])
    except UserError as error:
        raise UserError(f"{module}: {error}") from error


def _write_piece(piece: Piece, file: int, position: int, parts: Callable[[str], dict[str, Tensor]]) -> None:
    origin = piece.origin
    if isinstance(origin, Entry):
        tensor_files.copy_at(origin, file, position)
        return
    made = origin() if callable(origin) else origin
    tensor = parts(made[0])[made[1]] if isinstance(made, tuple) else made
    if Spec.of(tensor) != piece.spec:
        raise ValueError(f"{piece.name}: planned as {piece.spec}, made as {Spec.of(tensor)}")
    tensor_files.write_at(file, tensor_files.to_bytes(tensor), position)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file as Hugging Face's libraries do: indented by two, not escaped."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
