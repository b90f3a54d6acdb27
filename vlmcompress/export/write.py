"""Write the compressed checkpoint: the source folder with some tensors replaced.

transformers' saving is not used: unchanged tensors are copied as bytes under their names, so an engine that reads the source
reads the copy; names that vLLM does not find are corrected (`models.written_names`).
The other files that belong to a model (tokenizer, processor, chat template, ...) are copied too. One layer is in memory
at a time. Equal inputs give byte-identical files.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import AutoConfig

from vlmcompress.export import card, launch_files, manifest, tokenizers
from vlmcompress.export.formats import EngineFiles, ExportFormat, Parts, Writer
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.models import (
    ImageSetting,
    Source,
    load_processor,
    quiet_transformers,
    read_config,
    require_unquantized,
    untied,
    unwritten_names,
    without_missing_mtp,
)
from vlmcompress.models.layer_names import Layers
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.methods import TokenCounter
from vlmcompress.utils import folders, tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.model_folder import INDEX, companions
from vlmcompress.utils.progress import phase, phase_seconds
from vlmcompress.utils.tensor_headers import Entry, Spec
from vlmcompress.utils.text import parse_bytes
from vlmcompress.utils.work_folder import WorkFolder

Quantized = tuple[QTensor, Scheme, Tensor | None]
"""A linear layer's weight, its scheme, the scale of static activations."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write and the origin of its bytes: a stored entry, a tensor, a function that returns one, or a part of a
    quantized layer as (module, local name). `memory`: the parameter's memory name, where it is one."""

    name: str
    spec: Spec
    origin: Entry | Tensor | Callable[[], Tensor] | tuple[str, str]
    memory: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        original: folder of the source model; `files`: folder from which other files are copied.
        tensors: in the order in which they are written.
        quantized: linear layer (memory name) -> weight, scheme, input scale. Each is read once, when it is written.
        shapes: quantized linear layer -> its weight's shape.
        exporter: the format that is written; `layers`: what its config files say.
        config: config.json without the format's block.
        manifest: what `manifest.build` returns; files and sizes are added. Reading a layer may add its errors, which `work`
            keeps with the weight files.
        extra_files: name of an additional or changed file -> bytes, or data that are written as JSON.
        shard_size: largest weight file.
        mmproj: the recipe's.
        work: the folder of the run's finished work, which keeps finished weight files until all are; None: nothing does.
    """

    original: Path
    files: Path
    tensors: list[OutputTensor]
    quantized: Mapping[str, Quantized]
    shapes: Mapping[str, tuple[int, ...]]
    exporter: Writer
    layers: Layers
    config: dict
    manifest: dict[str, Any]
    extra_files: Mapping[str, Mapping | bytes] = field(default_factory=dict)
    shard_size: str | int = "5GB"
    mmproj: str | None = None
    work: WorkFolder | None = None


def write(
    checkpoint: Checkpoint,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Write the folder `out`, which appears whole or not at all, and return its manifest.

    Args:
        overwrite: replace an existing `out` that we wrote, once the new one is whole.
        progress: called with bytes written and bytes in all.
    """
    folders.require_out(checkpoint.original, out, overwrite=overwrite, mark=MANIFEST)
    limit, hashes = parse_bytes(checkpoint.shard_size, "shard_size"), dict[str, Any]()
    record, family = checkpoint.manifest, checkpoint.manifest["model"]["family"]
    # The source's model card is kept under another name.
    places = {
        place: Path(card.SOURCE_CARD) if str(place) == card.CARD else place for place in companions(checkpoint.files)
    }
    copied = [
        (checkpoint.files / name, place) for name, place in places.items() if str(place) not in checkpoint.extra_files
    ]
    needed = sum(tensor.spec.nbytes for tensor in checkpoint.tensors)
    finished = checkpoint.work.folder.glob("model*") if checkpoint.work else ()
    needed += sum(file.stat().st_size for file, _ in copied) - sum(file.stat().st_size for file in finished)
    folders.require_space(out, needed)
    with folders.new_folder(out) as tree:
        configs = checkpoint.exporter.configs(checkpoint.layers)
        block = configs.pop("config.json", None)
        config = checkpoint.config | ({"quantization_config": block} if block else {})
        write_json(tree / "config.json", checkpoint.exporter.model_config(config))
        for name, content in {**configs, **checkpoint.extra_files}.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                (tree / name).write_bytes(content)
            else:
                write_json(tree / name, dict(content))
        for file, place in copied:
            (tree / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, tree / place)
        with phase("writing"):
            if isinstance(checkpoint.exporter, EngineFiles):
                parts = _parts(tree, checkpoint)
                if problems := checkpoint.exporter.source_problems(tree, family, parts.config):
                    raise UserError(problems[0])
                tokens = tokenizers.compare_tokenizers(checkpoint.exporter, tree, parts.config)
                if tokens.problem:
                    raise UserError(tokens.problem)
                if tokens.warning:
                    record = record | {"warnings": [*record["warnings"], tokens.warning]}
                after = checkpoint.exporter.write_files(tree, family, parts, progress)
            else:
                after, hashes = write_weights(
                    tree,
                    checkpoint.tensors,
                    limit,
                    checkpoint.quantized,
                    checkpoint.exporter,
                    progress,
                    checkpoint.work,
                    record["errors"],
                )
        size = record["size"] | {"weights_after": after}
        record = record | {"size": size, "tensors": len(checkpoint.tensors), "timing": phase_seconds()}
        launch_files.write_launch_files(tree, record, out.name)
        (tree / card.CARD).write_text(card.render_card(record, tree, out.name), encoding="utf-8")
        record["files"] = manifest.hash_files(tree, lambda path: hashes.get(path.name) or manifest.hash_file(path))
        write_json(tree / MANIFEST, record)
    return record


def _parts(tree: Path, checkpoint: Checkpoint) -> Parts:
    """The content for a format that writes its own files; `tree` has the written config and processor."""
    with quiet_transformers():
        config = AutoConfig.from_pretrained(tree, local_files_only=True, trust_remote_code=False).to_dict()
        processor = load_processor(tree, False)
    plain = {t.memory or t.name: t for t in checkpoint.tensors if not isinstance(t.origin, tuple)}

    def read(name: str) -> Tensor:
        origin = plain[name].origin
        if isinstance(origin, Entry):
            value = tensor_files.read_tensor(origin)
            tensor_files.require_finite(origin, value)
            return value
        return origin() if callable(origin) else cast(Tensor, origin)

    schemes = {names[0]: scheme for names, scheme in checkpoint.layers.quantized.items()}
    return Parts(
        specs={name: tensor.spec for name, tensor in plain.items()},
        read=read,
        entries={name: tensor.origin for name, tensor in plain.items() if isinstance(tensor.origin, Entry)},
        layers={name: (scheme, checkpoint.shapes[name]) for name, scheme in schemes.items()},
        quantized=checkpoint.quantized,
        config=config,
        image=processor.image_processor.to_dict(),
        title=checkpoint.original.name,
        mmproj=checkpoint.mmproj.upper() if checkpoint.mmproj else None,
    )


def written_config(
    source: Source,
    quantized: Container[str],
    reducer: ReducerChoice | None = None,
    counter: TokenCounter | None = None,
    setting: ImageSetting | None = None,
) -> dict:
    """The content of config.json of a checkpoint of `source`, without the format's block.

    Args:
        quantized: linear layers that are quantized (memory names).
        reducer: the reducer of visual tokens that the checkpoint carries; None: none.
        counter: computes how many tokens an image keeps, for a reducer that needs the number.
        setting: the processor's setting that the checkpoint gets; None: the source's.
    """
    config = read_config(source.path, weights=False)
    require_unquantized(source.path, config)
    names = [entry.name for entry in source.entries.values()]
    config = without_missing_mtp(source.spec, source.spec.completed(config), names)
    config = setting.changed(config) if setting else config
    # Unchanged tensors are copied as bytes, and config.json has to match them in types, ties and draft heads.
    config = untied(config) if source.spec.lm_head in quantized else config  # a quantized head shares no weight
    config = source.float_type.config(config)
    return reducer_block.config_with_reducer(config, reducer, counter) if reducer else config


def plan_tensors(
    source: Source,
    exporter: Writer,
    schemes: Mapping[str, Scheme],
    changed: Mapping[str, Tensor] | None = None,
    kv_scales: Mapping[str, Tensor] | None = None,
) -> list[OutputTensor]:
    """List the output tensors that replace each of the source's tensors.

    Args:
        exporter: as in `Checkpoint`.
        schemes: quantized linear layer (memory name) -> its scheme.
        changed: parameter (memory name) -> new value, for norms and biases with a folded scale, and for trained weights.
        kv_scales: attention module (memory name) -> `[2]` scales of keys and values.
    """
    names, written, entries = source.names, source.written, list(source.entries.values())
    layers = {names[f"{module}.weight"]: module for module in schemes}
    values = {names[parameter]: value for parameter, value in (changed or {}).items()}
    if overlap := layers.keys() & values.keys():
        raise ValueError(f"both quantized and changed: {sorted(overlap)}")
    tensors, renamed = list[OutputTensor](), {disk: written[memory] for memory, disk in names.items()}
    memory = {disk: name for name, disk in names.items()}
    unwanted, specs = unwritten_names(names, [entry.name for entry in entries]), dict[str, Spec]()
    for entry in entries:
        name = renamed.get(entry.name, entry.name)
        if name in unwanted:
            continue
        spec = source.float_type.spec(memory.get(entry.name, entry.name), entry.spec)
        specs[entry.name] = spec
        if entry.name in layers:
            module = layers.pop(entry.name)
            prefix = name.removesuffix("weight")
            rows, columns = spec.shape
            for local, local_spec in exporter.specs(schemes[module], rows, columns, spec.dtype).items():
                tensors.append(OutputTensor(prefix + local, local_spec, (module, local)))
        elif entry.name in values:
            value = values.pop(entry.name)
            if tuple(value.shape) != spec.shape:
                raise ValueError(f"{entry.name} is {spec.shape}, its new value {tuple(value.shape)}")
            value = value.to(tensor_files.DTYPES[spec.dtype])
            tensors.append(OutputTensor(name, spec, value, memory.get(entry.name)))
        else:
            tensors.append(OutputTensor(name, spec, cast_entry(entry, spec), memory.get(entry.name)))
    if layers or values:
        raise ValueError(f"not in the source checkpoint: {sorted([*layers, *values])}")
    for module, scales in (kv_scales or {}).items():
        # An attention module has no tensor: its name on disk follows from that of a layer in it, and so does the type, in which
        # transformers computes attention.
        below, sibling = next((name, disk) for name, disk in names.items() if name.startswith(f"{module}."))
        prefix = written[below].removesuffix(below.removeprefix(f"{module}."))
        stored = scales.to(tensor_files.DTYPES[specs[sibling].dtype])
        for local, scale in zip(exporter.KV_SCALES or (), stored.reshape(2, 1), strict=True):
            tensors.append(OutputTensor(prefix + local, Spec.of(scale), scale))
    return tensors


def cast_entry(entry: Entry, spec: Spec) -> Entry | Callable[[], Tensor]:
    """A stored tensor in the type of `spec`: the entry itself, or a function that reads it. The latter raises `UserError` for
    numbers that are too large for the type."""
    if entry.spec.dtype == spec.dtype:
        return entry

    def make() -> Tensor:
        stored = tensor_files.read_tensor(entry)
        tensor_files.require_finite(entry, stored)
        value = stored.to(tensor_files.DTYPES[spec.dtype])
        if not tensor_files.all_finite(value) and tensor_files.all_finite(stored):
            raise UserError(
                f"tensor '{entry.name}' has numbers too large for {value.dtype}; use --dtype bfloat16 or float32"
            )
        return value

    return make


def output_specs(
    stored: Mapping[str, Spec],
    schemes: Mapping[str, Scheme],
    names: Mapping[str, str],
    exporter: ExportFormat,
    kv_layers: int,
) -> dict[str, Spec]:
    """List the type and shape of every tensor that will be written, by unique names: the exact size of the output.

    Args:
        stored: tensor name on disk -> type and shape, of the source.
        schemes: quantized linear layer (memory name) -> its scheme.
        names: memory name of a parameter -> its name on disk.
        exporter: the format that is written.
        kv_layers: number of attention modules that get scales of keys and values.
    """
    unwanted = unwritten_names(names, stored)
    specs = {name: spec for name, spec in stored.items() if name not in unwanted}
    for name, scheme in schemes.items():
        weight = specs.pop(names[f"{name}.weight"])
        try:
            rows, columns = weight.shape
            layer = exporter.specs(scheme, rows, columns, weight.dtype)
        except (UserError, ValueError):
            continue  # a shape that the scheme cannot have; the plan reports it
        specs |= {f"{name}:{local}": spec for local, spec in layer.items()}
    # Scales of keys and values have the type of the layers next to them.
    dtype = next((stored[names[f"{name}.weight"]].dtype for name in schemes), "BF16")
    return specs | {f"kv_cache:{i}": Spec(dtype, (2,)) for i in range(kv_layers)}


def write_weights(
    tree: Path,
    tensors: list[OutputTensor],
    limit: int,
    quantized: Mapping[str, Quantized],
    exporter: Writer,
    progress: Callable[[int, int], None] | None,
    work: WorkFolder | None = None,
    errors: dict[str, Any] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Write the weight files into the folder `tree`, with an index if there are several.

    A tensor is written while the next one is computed, and a file synced and hashed while the next one is written.

    Args:
        limit: most bytes of a file.
        quantized: as in `Checkpoint`; two layers are in memory at a time.
        progress: called with bytes written and bytes in all.
        work: as in `Checkpoint`. Files that an interrupted run has finished are not written again.
        errors: the manifest's errors of layers, which reading them may change.

    Returns:
        Bytes of tensors, and file name -> the manifest's entry.

    Raises:
        UserError: a value does not fit into the format.
    """
    by_name, total = {tensor.name: tensor for tensor in tensors}, sum(tensor.spec.nbytes for tensor in tensors)
    if len(by_name) < len(tensors):
        raise ValueError("two tensors of the output have the same name")
    files = tensor_files.split_shards(((tensor.name, tensor.spec) for tensor in tensors), limit)
    files_by_name = dict(zip(tensor_files.shard_names(len(files)), files, strict=True))
    folder, errors, done = work.folder if work else tree, {} if errors is None else errors, 0

    @functools.lru_cache(maxsize=1)
    def layer_tensors(module: str) -> dict[str, Tensor]:
        layer = quantized[module]  # its own errors name the layer
        try:
            return exporter.tensors(*layer)
        except UserError as error:
            raise UserError(f"{module}: {error}") from error

    def finish(path: Path, errors: dict[str, Any]) -> dict[str, Any]:
        """Give a whole file its name; returns the manifest's entry."""
        folders.sync_file(path)
        described = manifest.hash_file(path)
        path.rename(path.with_suffix(""))
        if work:
            work.write_note(path.stem, {"described": described, "errors": errors})
        return described

    hashes: dict[str, Any] = {}
    with ThreadPoolExecutor(1) as finisher:
        finished: dict[str, Future] = {}
        for file_name, specs in files_by_name.items():
            if work and (folder / file_name).exists() and (note := work.read_note(file_name)):
                hashes[file_name] = note["described"]
                errors |= note["errors"]
                done += sum(spec.nbytes for spec in specs.values())
                continue
            header, positions = tensor_files.layout(specs)
            part = folder / f"{file_name}.part"
            with folders.removed_on_error(part), part.open("wb") as file, ThreadPoolExecutor(1) as writer:
                written = writer.submit(tensor_files.write_at, file.fileno(), header, 0)
                for name, spec in specs.items():
                    origin, target = by_name[name].origin, (file.fileno(), positions[name])
                    if isinstance(origin, Entry):
                        job = functools.partial(tensor_files.copy_at, origin, *target)  # its bytes, in parts
                    else:
                        whole = origin() if callable(origin) else origin
                        value = layer_tensors(whole[0])[whole[1]] if isinstance(whole, tuple) else whole
                        if Spec.of(value) != spec:
                            raise ValueError(f"{name}: planned as {spec}, computed as {Spec.of(value)}")
                        data = tensor_files.to_bytes(value)
                        job = functools.partial(tensor_files.write_at, target[0], data, target[1])
                    written.result()
                    written = writer.submit(job)
                    done += spec.nbytes
                    if progress:
                        progress(done, total)
                written.result()
            finished[file_name] = finisher.submit(finish, part, dict(errors))
        hashes |= {file_name: future.result() for file_name, future in finished.items()}
    for file_name in hashes if work else ():
        (folder / file_name).rename(tree / file_name)
    if len(files) > 1:
        weight_map = {name: file_name for file_name, specs in files_by_name.items() for name in specs}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(tree / INDEX, index)
    return total, hashes


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file as Hugging Face's libraries do: indented by two, not escaped."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def rename(folder: Path, name: str) -> None:
    """Write launch files, card and manifest of the checkpoint in `folder` anew, for a folder called `name`.

    Files are replaced and not changed in place, so that others to which they are linked stay as they are.

    Raises:
        UserError: the folder has no manifest that can be read.
    """
    record = manifest.read_manifest(folder)
    record["recipe"] = record["recipe"] | {"out": name}
    hashes = {
        path: described
        for path, described in record["files"].items()
        if path != card.CARD and not path.startswith(f"{launch_files.FOLDER}/")  # these say the folder's name
    }
    launch_paths = launch_files.write_launch_files(folder, record, name)
    text = card.render_card(record, folder, name)
    for path in (folder / card.CARD, folder / MANIFEST):
        path.unlink(missing_ok=True)
    (folder / card.CARD).write_text(text, encoding="utf-8")
    for path in (*launch_paths, folder / card.CARD):
        hashes[path.relative_to(folder).as_posix()] = manifest.hash_file(path)
    write_json(folder / MANIFEST, record | {"files": dict(sorted(hashes.items()))})
