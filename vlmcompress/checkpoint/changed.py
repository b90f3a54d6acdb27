"""Write a 16-bit checkpoint with some tensors changed, which a run begins with: rotated, or with an adapter merged.

Tensors are read, changed and written one by one; other files are copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress.checkpoint.write import WEIGHTS, OutputTensor, write_json, write_weights
from vlmcompress.common import folders, tensor_files
from vlmcompress.common.registry import FORMATS
from vlmcompress.common.tensor_files import Entry
from vlmcompress.common.text import parse_size

Change = Callable[[Tensor], Tensor]


def has(out: Path, record: str, mark: str) -> bool:
    """Whether `out` has been written with the text `mark` in its file `record`."""
    return (out / record).is_file() and (out / record).read_text(encoding="utf-8") == mark


def write(
    source: Path,
    out: Path,
    tensors: Sequence[OutputTensor],
    config: Mapping[str, Any],
    record: tuple[str, str],
    *,
    shard_size: str = "5GB",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the folder `out`, which appears whole or not at all, in the place of an earlier one.

    Args:
        source: folder whose other files are copied.
        config: content of config.json.
        record: name and text of a file that says what `out` was made of.
        progress: called with bytes written and bytes in all.
    """
    name, mark = record
    folders.check(source, out, overwrite=True, mark=name)
    with folders.new_folder(out) as tree:
        write_weights(tree, list(tensors), parse_size(shard_size, "shard_size"), {}, FORMATS.get("bf16"), progress)
        write_json(tree / "config.json", dict(config))
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            place = file.relative_to(source)
            hidden = any(part.startswith(".") for part in place.parts)
            if not hidden and not file.name.endswith(WEIGHTS) and str(place) != "config.json":
                (tree / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, tree / place)
        (tree / name).write_text(mark, encoding="utf-8")


def lazily(entry: Entry, change: Change, device: torch.device) -> Callable[[], Tensor]:
    """A function that reads a tensor and changes it, in float64 where it is stored in 32 bits and else in float32."""

    def make() -> Tensor:
        stored = tensor_files.read_tensor(entry)
        wide = torch.float64 if stored.dtype == torch.float32 and device.type != "mps" else torch.float32
        return change(stored.to(device, wide)).to("cpu", stored.dtype).contiguous()

    return make
