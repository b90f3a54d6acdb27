"""safetensors files as bytes: plan shards, read tensors, write them at their offsets.

A tensor can be copied from one file to another without being decoded (`utils.tensor_headers` reads headers), and a file of any
size can be written with one tensor in memory. Order and padding are those of the official serializer (tensors by dtype, widest
first, then by name; header padded with spaces to 8 bytes): equal content gives equal bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from vlmcompress.utils.errors import UserError
from vlmcompress.utils.model_folder import SINGLE
from vlmcompress.utils.tensor_headers import FLOATS, TYPES, Entry, Spec

DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, (name, _) in TYPES.items()}
_RANK = {code: rank for rank, code in enumerate(TYPES)}
_WRITTEN = 1 << 26  # bytes that are written by one call
_COPIED = 1 << 20  # bytes that are read by one call, which stay in a core's cache
_CHECKED = 1 << 19  # numbers that are looked at by one call
_EXPONENTS = {
    torch.float8_e4m3fn: (torch.int8, 0x7F),  # it has no infinity, and 0x7E is its largest number
    torch.float8_e5m2: (torch.int8, 0x7C),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}
"""Bits that are all set in NaN and infinity alone, and the integer to see them in."""


def read_tensor(entry: Entry) -> Tensor:
    """The values of one stored tensor. Raises `UserError` if it cannot be read."""
    data = torch.empty(entry.end - entry.start, dtype=torch.uint8).numpy().data
    with _opened(entry) as file:
        _fill(data, file, entry)
    return _view(entry, data, 0).contiguous()


def _opened(entry: Entry) -> BinaryIO:
    """The file of `entry`, open at its first byte."""
    try:
        file = entry.file.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {entry.file}: {error.strerror}; restore it and run again") from error
    file.seek(entry.start)
    return file


def _fill(data: memoryview, file: BinaryIO, entry: Entry) -> None:
    """Fill `data` from the position of an open file, which is that of `entry`."""
    try:
        count = file.readinto(data)  # type: ignore[attr-defined]  # of a buffered file, it reads all that there is
    except OSError as error:
        raise UserError(f"cannot read {entry.file}: {error.strerror}; restore it and run again") from error
    if count < len(data):
        raise UserError(f"{entry.file} became shorter while it was read; restore it and run again")


def map_tensors(entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Name -> tensor, memory-mapped copy-on-write: values are read on first use, changes stay in memory.

    A tensor that is stored as columns of a matrix is a non-contiguous view.
    """
    files: dict[Path, mmap.mmap] = {}
    for path in {entry.file for entry in entries.values()}:
        with path.open("rb") as file:
            files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _view(entry, files[entry.file], entry.start) for name, entry in entries.items()}


def _view(entry: Entry, data: Any, offset: int) -> Tensor:
    """The tensor whose bytes begin at `offset` of a buffer."""
    dtype, count = DTYPES[entry.spec.dtype], (entry.end - entry.start) // DTYPES[entry.spec.dtype].itemsize
    if not count:
        return torch.empty(entry.spec.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
    if entry.channels_last:
        outputs, channels, *sides = entry.spec.shape
        return flat.reshape(outputs, *sides, channels).movedim(-1, 1)
    if entry.columns is None:
        return flat.reshape(entry.spec.shape)
    width, first, end = entry.columns
    return flat.reshape(-1, width)[:, first:end].T


def to_bytes(tensor: Tensor) -> memoryview:
    """The little-endian bytes of a tensor."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def layout(specs: dict[str, Spec]) -> tuple[bytes, dict[str, int]]:
    """Header bytes of a file with these tensors, and name -> absolute byte position."""
    ordered = sorted(specs, key=lambda name: (-_RANK[specs[name].dtype], name))
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in ordered:
        end = position + specs[name].nbytes
        header[name] = {
            "dtype": specs[name].dtype,
            "shape": list(specs[name].shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    head = struct.pack("<Q", len(raw)) + raw
    return head, {name: len(head) + header[name]["data_offsets"][0] for name in ordered}


def split_shards(specs: Iterable[tuple[str, Spec]], limit: int) -> list[dict[str, Spec]]:
    """Split tensors, in order, into shards of at most `limit` bytes; a larger tensor gets a shard to itself."""
    shards: list[dict[str, Spec]] = [{}]
    used = 0
    for name, spec in specs:
        if shards[-1] and used + spec.nbytes > limit:
            shards.append({})
            used = 0
        shards[-1][name] = spec
        used += spec.nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """The Hugging Face file names of `count` shards."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_at(file: int, data: memoryview | bytes, position: int) -> None:
    """Write all of `data` at a byte position of an open file."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view[:_WRITTEN], position)
        view, position = view[written:], position + written


def copy_at(entry: Entry, file: int, position: int) -> None:
    """Copy a stored tensor to a byte position of another open file, in chunks of `_COPIED` bytes unless it is `columns`.

    Raises:
        UserError: the tensor cannot be read, or is one of `FLOATS` that holds NaN or infinity.
    """
    if entry.columns is not None or entry.channels_last:
        value = read_tensor(entry)
        require_finite(entry, value)
        return write_at(file, to_bytes(value), position)
    with _opened(entry) as source:
        left, block = entry.end - entry.start, bytearray(_COPIED)
        values = torch.frombuffer(block, dtype=DTYPES[entry.spec.dtype])
        while left:
            part = memoryview(block)[: min(left, _COPIED)]
            _fill(part, source, entry)
            require_finite(entry, values[: len(part) // values.itemsize])
            write_at(file, part, position)
            left, position = left - len(part), position + len(part)


def require_finite(entry: Entry, values: Tensor) -> None:
    """Raise `UserError` for NaN or infinity in some values of a stored tensor, if it is one of `FLOATS`."""
    if entry.spec.dtype in FLOATS and not all_finite(values):
        raise UserError(
            f"{entry.file}: tensor '{entry.name}' holds NaN or infinity; take a checkpoint from before, or download this one "
            "again"
        )


def all_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinity, without a copy of them all; integers are finite."""
    if values.dtype not in _EXPONENTS:
        return True
    integer, exponent = _EXPONENTS[values.dtype]
    parts = values.detach().reshape(-1).view(integer).split(_CHECKED) if values.numel() else ()
    return all(int((part & exponent).amax()) != exponent for part in parts)
