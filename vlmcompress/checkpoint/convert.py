"""Write a quantized checkpoint in another format: the same codes and scales, packed otherwise, without quantizing again.

What the new format can express is equal bit for bit when it is unpacked; what it cannot express is refused by name before a
byte is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlmcompress import models
from vlmcompress.checkpoint import manifest
from vlmcompress.checkpoint.layer_targets import layers_of
from vlmcompress.checkpoint.manifest import MANIFEST
from vlmcompress.checkpoint.pieces import Piece
from vlmcompress.checkpoint.stored import Stored
from vlmcompress.checkpoint.write import Content, write_folder
from vlmcompress.common import folders
from vlmcompress.common.layer_names import Layers
from vlmcompress.common.registry import FORMATS
from vlmcompress.errors import UserError, did_you_mean
from vlmcompress.exporters import Writer, problems


def convert(
    source: Path,
    out: Path,
    format: str,
    *,
    shard_size: str = "5GB",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Write the quantized checkpoint in `source` as `out`, in another format, and return the manifest of `out`.

    Args:
        source: a checkpoint of ours, or another tool's in a format that is read.
        out: folder to write; it appears whole or not at all.
        format: name of a module in `vlmcompress.exporters`.
        shard_size: largest weight file.
        overwrite: replace an existing `out` that we wrote, once the new one is whole.
        progress: called with bytes written and bytes in all.

    Raises:
        UserError: `source` is no such checkpoint or damaged, the format cannot hold what it has, or `out` cannot be written.
    """
    if format not in FORMATS.names():
        raise UserError(f"unknown format '{format}'{did_you_mean(format, FORMATS.names())}")
    writer = FORMATS.get(format)
    allowed = functools.partial(folders.check, source, out, overwrite=overwrite, mark=MANIFEST)
    allowed()
    with models.quiet():
        stored = Stored.of(source)
    if stored.format == format and (source / MANIFEST).is_file():
        raise UserError(f"{source} is {format} already; choose another format")
    models.check_files(source)
    written = models.written_names(stored.names, stored.spec)
    tensors = {entry.name: entry.spec for entry in stored.entries}
    if fault := models.draft_fault(stored.spec, stored.config, tensors):
        raise UserError(fault)
    layers = layers_of(
        stored.schemes, stored.meta_model, written, stored.spec, stored=tensors, kv_cache=bool(stored.kv_scales)
    )
    check(stored, layers, writer)
    config = models.found_draft(stored.spec, stored.spec.completed(stored.config), tensors)
    config.pop("quantization_config", None)
    before, record = _record(stored, format)
    record["warnings"] = [*record["warnings"], *models.draft_dropped(stored.spec, stored.config, tensors)]
    plan = _pieces(stored, written, writer)
    content = Content(plan, stored, writer, layers, config, record, before)
    with folders.claimed(out, allowed):
        return write_folder(source, out, content, shard_size=shard_size, progress=progress)


def check(stored: Stored, layers: Layers, writer: Writer) -> None:
    """Raise `UserError` for the first thing that a format cannot hold of a checkpoint."""
    for problem in problems(writer, layers):
        raise UserError(problem)
    for layer in stored.layers.values():
        try:
            writer.specs(layer.scheme, *layer.shape, "BF16")
        except ValueError as error:
            raise UserError(f"{layer.prefix.removesuffix('.')}: {error}") from error


def _pieces(stored: Stored, written: Mapping[str, str], writer: Writer) -> list[Piece]:
    """What is written in the place of each of the checkpoint's tensors."""
    renamed = {disk: written[memory] for memory, disk in stored.names.items()}
    owner = {entry.name: name for name, layer in stored.layers.items() for entry in layer.entries.values()}
    kv = {
        entry.name: prefix + local
        for prefix, pair in stored.kv_scales.items()
        for entry, local in zip(pair, writer.KV_SCALES or (), strict=True)
    }
    unwanted = set(models.left_out(stored.names, [e.name for e in stored.entries]))
    found, done = list[Piece](), set[str]()
    for entry in stored.entries:
        module = owner.get(entry.name)
        if module is None:
            if entry.name not in unwanted:
                name = kv.get(entry.name) or renamed.get(entry.name, entry.name)
                found.append(Piece(name, entry.spec, entry))
        elif module not in done:
            done.add(module)
            layer = stored.layers[module]
            prefix = renamed[f"{layer.prefix}weight"].removesuffix("weight")
            for local, spec in writer.specs(layer.scheme, *layer.shape, stored.scale_type(module)).items():
                found.append(Piece(prefix + local, spec, (module, local)))
    return found


def _record(stored: Stored, format: str) -> tuple[int, dict[str, Any]]:
    """Bytes of the original's tensors, and the manifest of the new checkpoint but for sizes and hashes.

    The original of another tool's checkpoint is not known: it is taken to be 16 bits wide.
    """
    packed = {entry.name for layer in stored.layers.values() for entry in layer.entries.values()}
    total = sum(entry.spec.nbytes for entry in stored.entries if entry.name not in packed)
    total += sum(2 * rows * columns for rows, columns in (layer.shape for layer in stored.layers.values()))
    converted = {"from": stored.format, "to": format, "folder": stored.path.resolve().name}
    if (stored.path / MANIFEST).is_file():
        known = manifest.read(stored.path)
        manifest.verify(stored.path, known)
        recipe = known["recipe"] | {"format": format}
        return known["size"]["weights_before"], known | {"recipe": recipe, "converted": converted}
    recipe = {"model": str(stored.path), "scheme": "converted", "format": format, "seed": None}
    made = manifest.build(stored.path, family=stored.spec.family, recipe=recipe, calibration=None, errors={})
    return total, made | {"converted": converted}
