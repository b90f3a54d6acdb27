"""Write the compressed checkpoint: the source folder with some tensors replaced.

Nothing goes through transformers' saving: tensors that do not change are copied as bytes, under the names they had, so
what an engine could read before it can read now; names that vLLM does not find are put right (`models.written_names`).
Every other file (tokenizer, processor, chat template, ...) is copied too. One layer is in memory at a time. Equal inputs
give byte-identical files.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from torch import Tensor

from vlmcompress.checkpoint import card, launch_files, reducer_block
from vlmcompress.checkpoint.manifest import MANIFEST, hash_files
from vlmcompress.common import folders, json_files, phases, tensor_files
from vlmcompress.common.tensor_files import Entry, Spec
from vlmcompress.common.text import parse_size, size
from vlmcompress.errors import UserError
from vlmcompress.models import left_out, refuse_quantized, shards
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.recipe.reducer import ReducerChoice
from vlmcompress.reducers import TokenCounter

Quantized = tuple[QTensor, Scheme, Tensor | None]  # weight, scheme, scale of static activations

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
_WRITTEN = ("config.json", card.CARD, MANIFEST)  # written anew, not copied


@dataclass(frozen=True)
class _Piece:
    """One tensor to write and where its bytes come from: a stored entry, a tensor, or a part of a quantized layer."""

    name: str
    spec: Spec
    origin: Entry | Tensor | tuple[str, str]


@dataclass
class _Plan:
    """The tensors to write, in order."""

    pieces: list[_Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(piece.spec.nbytes for piece in self.pieces)


def write(
    source: Path,
    out: Path,
    *,
    quantized: Mapping[str, Quantized],
    names: Mapping[str, str],
    exporter: ModuleType,
    quantization_config: dict,
    manifest: dict,
    written: Mapping[str, str] | None = None,
    changed: Mapping[str, Tensor] | None = None,
    kv_scales: Mapping[str, Tensor] | None = None,
    reducer: ReducerChoice | None = None,
    counter: TokenCounter | None = None,
    shard_size: str | int = "5GB",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Write `out` and return its manifest.

    Args:
        source: folder of the original checkpoint.
        out: folder to write; it appears whole or not at all.
        quantized: linear layer (memory name) -> weight, scheme, input scale. Looked up twice, so it may be lazy.
        names: memory name of a parameter -> its name on disk, as `models.disk_names` gives it.
        exporter: the format that is written, a module of `vlmcompress.exporters`.
        quantization_config: block to add to config.json, as the exporter makes it; may be empty.
        manifest: what `manifest.build` returned; files and sizes are added here.
        written: memory name of a parameter -> its name in `out`; None: `names`.
        changed: parameter (memory name) -> new value, for norms and biases that took a scale in.
        kv_scales: attention module (memory name) -> `[2]` scales of keys and values.
        reducer: the reducer of visual tokens that the checkpoint is to carry; None for none.
        counter: computes how many tokens an image keeps, for a reducer that must be told the number.
        shard_size: largest weight file, such as `5GB`.
        overwrite: replace an existing `out` that we wrote, once the new one is whole.
        progress: called with bytes written and bytes in all.
    """
    limit = parse_size(shard_size, "shard_size")
    folders.check(source, out, overwrite=overwrite, mark=MANIFEST)
    config = json_files.read(source / "config.json")
    refuse_quantized(config)
    entries = [entry for file in shards(source) for entry in tensor_files.read_entries(file)]
    plan = _plan(entries, quantized, names, written or names, changed or {}, kv_scales or {}, exporter)
    others = list(_other_files(source))
    _check_space(out, plan.nbytes + sum(file.stat().st_size for file, _ in others))
    with folders.new_folder(out) as tree:
        with phases.phase("writing"):
            _write_weights(tree, plan, limit, quantized, exporter, progress)
        config |= {"quantization_config": quantization_config} if quantization_config else {}
        _write_json(tree / "config.json", reducer_block.write(config, reducer, counter) if reducer else config)
        for file, target in others:
            (tree / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, tree / target)
        size = {"weights_before": sum(entry.spec.nbytes for entry in entries), "weights_after": plan.nbytes}
        complete = manifest | {"size": size, "tensors": len(plan.pieces), "timing": phases.so_far()}
        launch_files.write(tree, complete, out.name)
        (tree / card.CARD).write_text(card.render(complete, tree, out.name), encoding="utf-8")
        complete["files"] = hash_files(tree)
        _write_json(tree / MANIFEST, complete)
    return complete


def _plan(
    entries: list[Entry],
    quantized: Mapping[str, Quantized],
    names: Mapping[str, str],
    written: Mapping[str, str],
    changed: Mapping[str, Tensor],
    kv_scales: Mapping[str, Tensor],
    exporter: ModuleType,
) -> _Plan:
    """Plan what is written in the place of each of the source's tensors."""
    layers = {names[f"{module}.weight"]: module for module in quantized}
    values = {names[parameter]: value for parameter, value in changed.items()}
    if overlap := layers.keys() & values.keys():
        raise ValueError(f"both quantized and changed: {sorted(overlap)}")
    plan, renamed = _Plan(), {disk: written[memory] for memory, disk in names.items()}
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
            for local, spec in exporter.layout(weight, scheme, input_scale).items():
                plan.pieces.append(_Piece(prefix + local, spec, (module, local)))
        elif entry.name in values:
            value = values.pop(entry.name)
            if Spec.of(value) != entry.spec:
                raise ValueError(f"{entry.name} is stored as {entry.spec}, its new value is {Spec.of(value)}")
            plan.pieces.append(_Piece(name, entry.spec, value))
        else:
            plan.pieces.append(_Piece(name, entry.spec, entry))
    if layers or values:
        raise ValueError(f"not in the source checkpoint: {sorted([*layers, *values])}")
    dtypes = {entry.name: entry.spec.dtype for entry in entries}
    for module, scales in kv_scales.items():
        prefix, sibling = _disk_prefix(module, names, written)
        stored = scales.to(tensor_files.DTYPES[dtypes[sibling]])  # transformers computes attention in the scales' type
        for local, scale in zip(("k_scale", "v_scale"), stored.reshape(2, 1), strict=True):
            plan.pieces.append(_Piece(prefix + local, Spec.of(scale), scale))
    if len({piece.name for piece in plan.pieces}) < len(plan.pieces):
        raise ValueError("two tensors of the output have the same name")
    return plan


def _disk_prefix(module: str, names: Mapping[str, str], written: Mapping[str, str]) -> tuple[str, str]:
    """Name to write, with the dot, of a module that has no tensor of its own, and a source's tensor below it."""
    memory, disk = next((memory, disk) for memory, disk in names.items() if memory.startswith(f"{module}."))
    return written[memory].removesuffix(memory.removeprefix(f"{module}.")), disk


def _check_space(out: Path, needed: int) -> None:
    folder = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"no space for {out}: it needs {size(needed)}, {folder} has {size(free)} free; "
            "free some or choose another output"
        )


def _write_weights(
    tree: Path,
    plan: _Plan,
    limit: int,
    quantized: Mapping[str, Quantized],
    exporter: ModuleType,
    progress: Callable[[int, int], None] | None,
) -> None:
    pieces = {piece.name: piece for piece in plan.pieces}
    files = tensor_files.split(((piece.name, piece.spec) for piece in plan.pieces), limit)
    file_names = tensor_files.shard_names(len(files))
    parts = functools.lru_cache(maxsize=1)(lambda module: exporter.tensors(*quantized[module]))
    done = 0
    for file_name, specs in zip(file_names, files, strict=True):
        header, positions = tensor_files.layout(specs)
        with (tree / file_name).open("wb") as file:
            tensor_files.write_at(file.fileno(), header, 0)
            for name in specs:
                _write_piece(pieces[name], file.fileno(), positions[name], parts)
                done += specs[name].nbytes
                if progress:
                    progress(done, plan.nbytes)
    if len(files) > 1:
        where = {name: file_name for file_name, specs in zip(file_names, files, strict=True) for name in specs}
        index = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(where.items()))}
        _write_json(tree / tensor_files.INDEX, index)


def _write_piece(piece: _Piece, file: int, position: int, parts: Callable[[str], dict[str, Tensor]]) -> None:
    origin = piece.origin
    if isinstance(origin, Entry):
        tensor_files.copy_at(origin, file, position)
        return
    tensor = parts(origin[0])[origin[1]] if isinstance(origin, tuple) else origin
    if Spec.of(tensor) != piece.spec:
        raise ValueError(f"{piece.name}: planned as {piece.spec}, made as {Spec.of(tensor)}")
    tensor_files.write_at(file, tensor_files.to_bytes(tensor), position)


def _other_files(source: Path) -> Iterator[tuple[Path, Path]]:
    """List the files to copy, with their place in the output; the source's model card is kept under another name, and launch
    files that we wrote for the source are left out."""
    ours = (source / MANIFEST).is_file()
    for folder, subfolders, files in os.walk(source):
        if ours and Path(folder) == source:
            subfolders[:] = [name for name in subfolders if name != launch_files.FOLDER]
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(files):
            place = Path(folder, name).relative_to(source)
            if name.startswith(".") or name.endswith(_WEIGHTS):
                continue
            if str(place) == card.CARD:
                yield Path(folder, name), Path(card.SOURCE_CARD)
            elif str(place) not in _WRITTEN:
                yield Path(folder, name), place


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
