"""Write a quantized checkpoint with other values of some of its tensors, such as scales: all other bytes as they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vlmcompress import models
from vlmcompress.checkpoint import manifest
from vlmcompress.checkpoint.layer_targets import layers_of
from vlmcompress.checkpoint.pieces import Piece
from vlmcompress.checkpoint.stored import Stored
from vlmcompress.checkpoint.write import Content, write_folder
from vlmcompress.common.registry import FORMATS


def retouched(
    stored: Stored,
    out: Path,
    values: Mapping[str, Tensor],
    more: Mapping[str, Any],
    *,
    beside: Mapping[str, Mapping | bytes] | None = None,
    shard_size: str | int = "5GB",
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Write `out`, which `folders.check` has allowed, and return its manifest.

    Args:
        stored: the checkpoint, one of ours.
        out: folder to write; it appears whole or not at all.
        values: tensor's name on disk -> its new value, of the type and shape that it has there.
        more: entries of the manifest that are new or other than in that of `stored`.
        beside: further files, as of `Content`.
        shard_size: largest weight file.
        progress: called with bytes written and bytes in all.
    """
    known = manifest.read(stored.path)
    names = {entry.name: entry.spec for entry in stored.entries}
    plan = [Piece(entry.name, entry.spec, values.get(entry.name, entry)) for entry in stored.entries]
    more_names = {"stored": names, "kv_cache": bool(stored.kv_scales)}
    layers = layers_of(stored.schemes, stored.meta_model, stored.names, stored.spec, **more_names)  # type: ignore[arg-type]
    config = {key: value for key, value in stored.config.items() if key != "quantization_config"}
    models.check_files(stored.path)
    before, record = known["size"]["weights_before"], known | dict(more)
    content = Content(plan, stored, FORMATS.get(stored.format), layers, config, record, before, beside or {})
    return write_folder(stored.path, out, content, shard_size=shard_size, progress=progress)
