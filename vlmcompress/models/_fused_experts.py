"""Fused experts of a mixture on disk, from headers: transformers saves all experts of a block as two tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vlmcompress.models._spec import ModelSpec
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Entry, Spec


def one_by_one(entries: list[Entry], spec: ModelSpec) -> list[Entry]:
    """Replace fused tensors in a list of stored tensors by one entry per expert and layer.

    transformers saves `gate_up_proj [experts, 2 * width, in]` and `down_proj [experts, in, width]`; published checkpoints
    of Qwen3-VL have both transposed. The shapes of a block's two tensors determine the layout, even if one of them is square.
    Raises `UserError` if one is missing or the shapes do not match.
    """
    split_entries, by_name = list[Entry](), {entry.name: entry for entry in entries}
    for entry in entries:
        parent, _, leaf = entry.name.rpartition(".")
        if not _is_fused(entry, spec):
            split_entries.append(entry)
            continue
        pair = [by_name.get(f"{parent}.{name}") for name in ("gate_up_proj", "down_proj")]
        if None in pair or not all(_is_fused(half, spec) for half in pair if half):
            raise UserError(f"tensor '{entry.name}' in {entry.file} stands alone, without its pair; download it again")
        transposed = _transposed(*(half for half in pair if half))
        parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
        split_entries += _parts(entry, parent, parts, transposed)
    return split_entries


def _transposed(gate_up: Entry, down: Entry) -> bool:
    """Whether fused experts are stored as `[experts, in, out]`. Raises `UserError` if the two shapes do not match."""
    (n, a, b), (m, c, d) = gate_up.spec.shape, down.spec.shape
    if n == m and min(a, b, c, d) > 0:
        if (a, b) == (2 * d, c):
            return False
        if (a, b) == (d, 2 * c):
            return True
    raise UserError(
        f"experts in {gate_up.file} are of no known layout: '{gate_up.name}' has shape {[n, a, b]}, '{down.name}' "
        f"{[m, c, d]}; convert the checkpoint again"
    )


def _parts(entry: Entry, parent: str, names: tuple[str, ...], transposed: bool) -> Iterator[Entry]:
    """The weights `[out, in]` of each expert within a fused tensor."""
    count, rows, columns = entry.spec.shape
    step = (entry.end - entry.start) // count
    out, width = (columns, rows) if transposed else (rows, columns)
    spec = Spec(entry.spec.dtype, (out // len(names), width))
    # Experts are stored one after another, [experts, ...]; gate and up are columns of each if transposed, else rows.
    for number in range(count):
        start = entry.start + number * step
        for place, name in enumerate(names):
            full = f"{parent}.{number}.{name}.weight"
            if transposed:
                first = place * spec.shape[0]
                yield Entry(entry.file, full, spec, start, start + step, (columns, first, first + spec.shape[0]))
            else:
                first = start + place * spec.nbytes
                yield Entry(entry.file, full, spec, first, first + spec.nbytes)


def _is_fused(entry: Entry, spec: ModelSpec) -> bool:
    """Whether a stored tensor holds all experts of a decoder block. Tensors of an MTP head do not count."""
    parent, _, leaf = entry.name.rpartition(".")
    inside = spec.experts is not None and re.search(rf"\.\d+\.{re.escape(spec.experts)}$", parent)
    return bool(inside) and leaf in ("gate_up_proj", "down_proj") and not parent.startswith("mtp.")
