"""Write a checkpoint with a rotated residual stream: other weights, the same answers.

QuaRot's and SpinQuant's R1 and R2 (arXiv 2404.00456, section 4; arXiv 2405.16406, section 3.1), for vision-language models:
with gains `g` of the norm before it, each layer that reads the stream becomes `W diag(g) R`, each that writes it `R^T W`, and
the norm's gains 1; the embedding's rows and the projector's output are multiplied by R. In each attention, the rows of each
value head are multiplied by an R2 for this head, and the columns of `o` that read the head by the same R2: attention mixes
tokens, not channels, so that this changes nothing but rounding as well. Tensors are read, multiplied and written one by one.

A tied output head has to be untied: it absorbs the final norm's gains, which the embedding must not. So it becomes a separate
matrix, and config.json records this.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vlmcompress.export import changed
from vlmcompress.export.changed import Change, lazily
from vlmcompress.export.write import OutputTensor
from vlmcompress.models import Source, Stream, Values, head_on_disk, stream, untied
from vlmcompress.numerics.rotation import Kind, Rotation
from vlmcompress.utils import tensor_files
from vlmcompress.utils.identity import unchanged

RECORD = ".rotation.json"
_HEADS = 1 << 12
"""Upper bound of value heads per block: rotation `1 + block * _HEADS + head` belongs to that head."""


@dataclass(frozen=True)
class Rotations:
    """The rotation matrices of one run, determined by `kind` and `seed`."""

    kind: Kind
    seed: int

    def stream(self, width: int) -> Rotation:
        """The rotation of the residual stream, R1."""
        return Rotation(self.kind, width, self.seed)

    def head(self, block: int, head: int, width: int) -> Rotation:
        """The rotation of a value head, R2."""
        return Rotation(self.kind, width, self.seed, 1 + block * _HEADS + head)


def changes(of: Stream, rotations: Rotations, gains: Callable[[str], Tensor]) -> dict[str, Change]:
    """Memory name -> function from a parameter's value (float32 or float64) to its rotated value, for changed parameters.

    Args:
        of: the modules that read and write the stream, with or without bias.
        gains: function that reads the weight of a norm.
    """
    r1 = rotations.stream(of.width)

    def absorbed(
        norm: str, weight: Tensor
    ) -> Tensor:  # [out, in]: its input was g * rms(x) and becomes rms(x R): W diag(g) R
        return r1.rows(weight * gains(f"{norm}.weight").to(weight))

    def both(first: Change | None, then: Change, value: Tensor) -> Tensor:
        return then(value if first is None else first(value))

    per_tensor: dict[str, Change] = dict.fromkeys(of.rows, r1.rows)
    per_tensor |= {f"{norm}.weight": torch.ones_like for norm in of.norms}
    for linear, norm in of.readers.items():
        per_tensor[f"{linear}.weight"] = functools.partial(absorbed, norm)
    for linear in of.writers:
        per_tensor[f"{linear}.weight"], per_tensor[f"{linear}.bias"] = r1.columns, r1.rows  # R^T W and b R
    for block, values in enumerate(of.values):
        r2 = [rotations.head(block, head, values.width) for head in range(values.kv_heads)]
        for name, change in _value_changes(values, r2).items():
            # R1 on one side of the matrix, R2 on the other
            per_tensor[name] = functools.partial(both, per_tensor.get(name), change)
    return per_tensor


def _value_changes(values: Values, r2: list[Rotation]) -> dict[str, Change]:
    """The changes of value and output projections; `r2`: the rotation of each value head."""
    shared = values.heads // values.kv_heads

    # Attention mixes tokens, not channels of a head, so R2 of the values passes through it, and the output's columns undo it.
    def rows(value: Tensor) -> Tensor:
        parts = value.reshape(values.kv_heads, values.width, -1)
        return torch.stack([r.columns(part) for r, part in zip(r2, parts, strict=True)]).reshape(value.shape)

    def columns(value: Tensor) -> Tensor:  # [out, kv heads, queries that share one, width]
        parts = value.reshape(len(value), values.kv_heads, shared, values.width)
        return torch.stack([r.rows(parts[:, i]) for i, r in enumerate(r2)], 1).reshape(value.shape)

    return {f"{values.v}.weight": rows, f"{values.v}.bias": rows, f"{values.o}.weight": columns}


def write_rotated(
    source: Source,
    out: Path,
    rotations: Rotations,
    *,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the rotated checkpoint of `source` atomically to the folder `out`.

    Other files are copied. An existing `out` of the same source and rotation is kept.

    Args:
        device: device of the matrix products.
        progress: called with (bytes written, total bytes).

    Raises:
        UserError: the model can't be rotated, or `out` can't be written.
    """
    mark = record(source, rotations)
    if changed.has(out, RECORD, mark):
        return
    residual = stream(source.meta_model, source.spec, source.stored)
    entries = source.entries
    per_tensor = changes(residual, rotations, lambda name: tensor_files.read_tensor(entries[source.names[name]]))
    tensors = _plan_tensors(source, residual, per_tensor, torch.device(device))
    config = untied(source.config) if residual.tied else source.config
    changed.write_changed(source.path, out, tensors, config, (RECORD, mark), progress=progress)


def record(source: Source, rotations: Rotations) -> str:
    """Text that identifies the source and rotation of a rotated checkpoint."""
    stats = unchanged(sorted({entry.file for entry in source.entries.values()}))
    return json.dumps([source.config, stats, rotations.kind, rotations.seed], sort_keys=True)


def _plan_tensors(
    source: Source, residual: Stream, per_tensor: Mapping[str, Change], device: torch.device
) -> list[OutputTensor]:
    """The tensors to write; changed ones are computed when they are written."""
    memory = {disk: name for name, disk in source.names.items()}
    head, embedding = f"{residual.head}.weight", source.entries[source.names[residual.embedding]]
    tensors = []
    for entry in source.entries.values():
        name = memory.get(entry.name, "")
        if residual.tied and name == head:
            continue  # stored twice
        change = per_tensor.get(name)
        origin = entry if change is None else lazily(entry, change, device)
        tensors.append(OutputTensor(entry.name, entry.spec, origin))
    if residual.tied:
        tensors.append(OutputTensor(head_on_disk(source), embedding.spec, lazily(embedding, per_tensor[head], device)))
    return tensors
