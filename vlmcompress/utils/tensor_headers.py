"""Headers of safetensors files, read without torch: type, shape and place of each tensor.

A file is `u64 header length | JSON header | data`. The header maps a tensor's name to dtype, shape and byte range.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import functools
import math
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

TYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
}
"""Type -> its name in torch and its bytes, in the serializer's order: tensors of later types come first in a file."""
FLOATS = ("F16", "BF16", "F32")
"""Types of unquantized weights."""
_MAX_HEADER = 100_000_000  # the official reader's limit


@dataclass(frozen=True)
class Spec:
    """Type and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """The stored form of `tensor`."""
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(next(code for code, (other, _) in TYPES.items() if other == name), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * TYPES[self.dtype][1]


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: `start` and `end` are absolute byte positions.

    Attributes:
        columns: (width, first, end): the bytes hold a matrix `[in, width]`, and the tensor is the transpose of its columns
            `first` to `end`; None: the bytes are those of the tensor.
        channels_last: whether the bytes have dimension 1 of the tensor as the last, as MLX stores convolutions.
    """

    file: Path
    name: str
    spec: Spec
    start: int
    end: int
    columns: tuple[int, int, int] | None = None
    channels_last: bool = False


def read_entries(path: Path) -> list[Entry]:
    """All tensors of a safetensors file, in the order of their bytes. Reads only the header, and once while it is the same.

    Raises:
        UserError: the file is not safetensors, is truncated, or its header does not match the data.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; download or copy the file again") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a file; put the weights themselves there")
    return list(_read_entries(path, status.st_size, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)))


@functools.lru_cache(maxsize=256)
def _read_entries(path: Path, size: int, _state: tuple[int, ...]) -> tuple[Entry, ...]:
    """`read_entries` of a file of `size` bytes; `_state` changes when the file does."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else _MAX_HEADER + 1
            raw = file.read(length) if length <= min(_MAX_HEADER, size) else b""
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; download or copy the file again") from error
    try:
        header = json_files.parse_json(raw)
        if any(type(text) is not str for text in (header.pop("__metadata__", None) or {}).values()):
            raise TypeError("metadata that are not text")
        entries = [_entry(path, name, info, 8 + length) for name, info in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} is not a complete safetensors file (bad header); download or copy it again") from error
    entries.sort(key=lambda entry: (entry.start, entry.end, entry.name))
    position = 8 + length
    for entry in entries:
        if entry.start != position or entry.end - entry.start != entry.spec.nbytes:
            raise UserError(f"{path} is corrupt: the byte range of '{entry.name}' does not fit; download it again")
        position = entry.end
    if position != size:
        raise UserError(f"{path} has {size} bytes, its header needs {position}; it was cut short, download it again")
    return tuple(entries)


def _entry(path: Path, name: str, info: dict, base: int) -> Entry:
    start, end = info["data_offsets"]
    if not all(type(size) is int and size >= 0 for size in (start, end, *info["shape"])):
        raise TypeError("a size that is not a count")
    if info["dtype"] not in TYPES:
        raise UserError(f"{path}: tensor '{name}' has the unknown type {info['dtype']}; convert it with its own tool")
    return Entry(path, name, Spec(info["dtype"], tuple(info["shape"])), base + start, base + end)
