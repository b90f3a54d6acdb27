"""Write a checkpoint with a rotated residual stream: another model by its weights, the same by its answers.

QuaRot's and SpinQuant's R1 and R2 (arXiv 2404.00456, section 4; arXiv 2405.16406, section 3.2), for vision-language models:
with gains `g` of the norm before it, each layer that reads the stream becomes `W diag(g) R`, each that writes it `R^T W`, and
the norm's gains 1; the embedding's rows are multiplied by R, and so is what the projector puts out. In each attention the rows
of a value head are multiplied by an R2 of that head's own, and the columns of `o` that read it by the same: attention mixes
tokens and no channels, so that this, too, changes nothing but rounding. Tensors are read, multiplied and written one by one.

An output head that shares the embedding's weights can't share them any more: it takes in the final norm's gains, which the
embedding must not have. So it becomes a matrix of its own, and config.json says that it is.
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
"""More than a block has heads of values: rotation `1 + block * _HEADS + head` is that head's."""


@dataclass(frozen=True)
class Rotations:
    """The matrices of one run: `kind` and `seed` decide them all."""

    kind: Kind
    seed: int

    def stream(self, width: int) -> Rotation:
        """The residual stream's, R1."""
        return Rotation(self.kind, width, self.seed)

    def head(self, block: int, head: int, width: int) -> Rotation:
        """The one of a head of values, R2."""
        return Rotation(self.kind, width, self.seed, 1 + block * _HEADS + head)


def changes(of: Stream, rotations: Rotations, gains: Callable[[str], Tensor]) -> dict[str, Change]:
    """What becomes of each parameter that a rotation changes, by memory name: functions of its value in float32 or float64.

    Args:
        of: who reads and writes the stream; layers may have a bias or not.
        gains: reads the weight of a norm.
    """
    r1 = rotations.stream(of.width)

    def absorbed(
        norm: str, weight: Tensor
    ) -> Tensor:  # [out, in]: it read g * rms(x), and is to read rms(x R): W diag(g) R
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
            per_tensor[name] = functools.partial(
                both, per_tensor.get(name), change
            )  # R1 on one side of the matrix, R2 on the other
    return per_tensor


def _value_changes(values: Values, r2: list[Rotation]) -> dict[str, Change]:
    """What becomes of the layers of values and output; `r2`: the rotation of each head of values."""
    shared = values.heads // values.kv_heads

    # Attention mixes tokens and no channels of a head, so R2 of the values comes out of it and the output's columns undo it.
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
    shard_size: str = "5GB",
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the rotated checkpoint of `source` into the folder `out`, which appears whole or not at all.

    Other files are copied. A folder there that `write_rotated` made for the same source and rotation is left as it is.

    Args:
        device: where matrices are multiplied.
        progress: called with bytes written and bytes in all.

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
    changed.write_changed(source.path, out, tensors, config, (RECORD, mark), shard_size=shard_size, progress=progress)


def record(source: Source, rotations: Rotations) -> str:
    """What a rotated checkpoint is made of, as text."""
    stats = unchanged(sorted({entry.file for entry in source.entries.values()}))
    return json.dumps([source.config, stats, rotations.kind, rotations.seed], sort_keys=True)


def _plan_tensors(
    source: Source, residual: Stream, per_tensor: Mapping[str, Change], device: torch.device
) -> list[OutputTensor]:
    """The tensors to write: those that change are made when their turn comes."""
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
