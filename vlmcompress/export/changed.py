"""Write a 16-bit checkpoint with some tensors changed (rotated, or merged with an adapter), from which a run then starts.

Tensors are read, changed and written one by one; the model's other files are copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress.export.write import OutputTensor, write_json, write_weights
from vlmcompress.utils import folders, tensor_files
from vlmcompress.utils.model_folder import companions
from vlmcompress.utils.registry import FORMATS
from vlmcompress.utils.tensor_headers import Entry

Change = Callable[[Tensor], Tensor]
SHARD_BYTES = 5 * 10**9  # of the largest weight file


def has(out: Path, record: str, mark: str) -> bool:
    """Whether the folder `out` has the text `mark` in its file `record`."""
    return (out / record).is_file() and (out / record).read_text(encoding="utf-8") == mark


def write_changed(
    source: Path,
    out: Path,
    tensors: Sequence[OutputTensor],
    config: Mapping[str, Any],
    record: tuple[str, str],
    *,
    files: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the folder `out` atomically, replacing an earlier one.

    Args:
        source: folder of the original tensors.
        config: content of config.json.
        record: name and text of a file that identifies the source and the change.
        files: folder whose other files are copied; None: the source.
        progress: called with (bytes written, total bytes).
    """
    name, mark = record
    folders.require_out(source, out, overwrite=True, mark=name)
    with folders.new_folder(out) as tree:
        write_weights(tree, list(tensors), SHARD_BYTES, {}, FORMATS.get("bf16"), progress)
        write_json(tree / "config.json", dict(config))
        files = files or source
        for place in companions(files):
            (tree / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(files / place, tree / place)
        (tree / name).write_text(mark, encoding="utf-8")


def lazily(entry: Entry, change: Change, device: torch.device) -> Callable[[], Tensor]:
    """A function that reads a tensor and changes it, in float64 if it is stored in 32 bits, else in float32."""

    def make() -> Tensor:
        stored = tensor_files.read_tensor(entry)
        wide = torch.float64 if stored.dtype == torch.float32 and device.type != "mps" else torch.float32
        return change(stored.to(device, wide)).to("cpu", stored.dtype).contiguous()

    return make
