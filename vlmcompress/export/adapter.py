"""Merge a LoRA adapter of PEFT into its base, tensor by tensor, so that a large base is never held in memory.

`W' = W + s B A` with `s = alpha / r` (LoRA, arXiv 2106.09685), or `alpha / sqrt(r)` (rsLoRA, arXiv 2312.03732); with DoRA
(arXiv 2402.09353) the rows of W' are then given the lengths of its magnitude vector. An adapter of an embedding is `(B A)^T`.
Fully trained parameters (`modules_to_save`, biases, an embedding with rows for more tokens) replace the base's. Refused by
name are other methods of PEFT, convolutions, initializations that change the base's weights (PiSSA, OLoRA, CorDA), and an
adapter of an output head that shares the embedding's weights. An adapter of a block's fused experts (`target_parameters`)
has `A [experts r, in]` and `B [out, r experts]`, and changes each expert's weight by its own `s B A`.

Layer names are those of the transformers version that trained the adapter; they are mapped like names on disk.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.export import changed
from vlmcompress.export.changed import Change
from vlmcompress.export.write import OutputTensor
from vlmcompress.models import Source
from vlmcompress.recipe import Recipe
from vlmcompress.recipe.adapter import inputs_folder, other_base, read_adapter_config, replaced
from vlmcompress.utils import tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.identity import unchanged
from vlmcompress.utils.model_folder import ADAPTER_CONFIG as CONFIG
from vlmcompress.utils.model_folder import ADAPTER_WEIGHTS as WEIGHTS
from vlmcompress.utils.model_folder import adapter_files
from vlmcompress.utils.tensor_headers import FLOATS, Entry, read_entries

RECORD = ".adapter.json"
_TRAINED, _OF_BASE_MODULE = re.compile(r"\.modules_to_save(\.default)?\."), ".original_module."
_PREFIX, _WRAPPED = "base_model.model.", ".base_layer."  # the latter: parameters of a layer with an adapter
_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
# Settings of an adapter under which it is more than W + s B A -> the values under which it is not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    **dict.fromkeys(("arrow_config", "kasa_config", "lora_ga_config", "monteclora_config", "velora_config"), (None,)),
}
_OF_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class Low:
    """An adapter of one layer: `a [r, in]`, `b [out, r]`, for DoRA `magnitude [out]`; its scale; whether it is of an
    embedding, whose weight is the transpose; for one expert of fused ones its number, their number, and its rows of B."""

    a: Entry
    b: Entry
    scale: float
    magnitude: Entry | None = None
    embedding: bool = False
    expert: tuple[int, int, slice] | None = None

    def merged(self, weight: Tensor) -> Tensor:
        """The weight `[out, in]` with the adapter merged, in the weight's type."""
        a, b = (_factor(entry) for entry in (self.a, self.b))
        if self.expert is not None:
            number, count, rows = self.expert
            a, b = a.reshape(count, -1, a.shape[1])[number], b.reshape(len(b), -1, count)[rows, :, number]
        a, b = a.to(weight), b.to(weight)
        change = self.scale * (b @ a)
        merged = weight + (change.T if self.embedding else change)
        if self.magnitude is None:
            return merged
        lengths = tensor_files.read_tensor(self.magnitude).to(weight).flatten()
        return merged * (lengths / merged.norm(dim=1))[:, None]


@functools.lru_cache(maxsize=2)
def _factor(entry: Entry) -> Tensor:
    """A stored A or B. Those of fused experts are needed for one expert after the other."""
    return tensor_files.read_tensor(entry)


@dataclass(frozen=True)
class Merge:
    """The changes of an adapter to its base.

    Attributes:
        changes: parameter (memory name) -> function from the base's value to the merged one.
        rows: rows of embedding and output head if the adapter was trained with another vocabulary; None: the base's.
    """

    changes: Mapping[str, Change]
    rows: int | None = None


def adapter_problem(folder: Path, source: Source) -> str | None:
    """The reason why an adapter can't be merged into a model, from the headers of both; None if it can."""
    try:
        _merge(folder, source)
    except UserError as error:
        return str(error)
    return None


def adapter_notes(recipe: Recipe) -> list[str]:
    """Notes about files that a recipe's adapter replaces, and about another base that it names."""
    kinds = replaced(recipe.model, recipe.adapter)
    notes = [f"the adapter's {' and '.join(kinds)} replaced the base's"] if kinds else []
    if other := recipe.adapter and other_base(recipe.model, recipe.adapter):
        notes.append(f"the adapter was trained on {other}; on another model its changes are wrong, even if shapes fit")
    return notes


def write_merged(
    source: Source,
    folder: Path,
    out: Path,
    *,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `source`, merged with the adapter in `folder`, to the folder `out`, unless it exists already.

    Args:
        device: device of the matrix products.
        progress: called with (bytes written, total bytes).

    Raises:
        UserError: the adapter is damaged, of another model, or of an unsupported kind.
    """
    read = sorted({entry.file for entry in source.entries.values()}) + adapter_files(folder)
    mark = json.dumps([source.config, unchanged(read)], sort_keys=True)
    if changed.has(out, RECORD, mark):
        return
    merge, disk = _merge(folder, source), {name: memory for memory, name in source.names.items()}
    for name, entry in _entries(folder).items():
        if not tensor_files.read_tensor(entry).isfinite().all():
            raise UserError(
                f"{folder / WEIGHTS}: '{name}' holds NaN or infinity; train it again, or take an earlier one"
            )
    tensors, vocabulary = [], _vocabulary(source)
    for entry in source.entries.values():
        memory, spec = disk.get(entry.name, ""), entry.spec
        if merge.rows and memory in vocabulary:
            spec = replace(spec, shape=(merge.rows, *spec.shape[1:]))
        change = merge.changes.get(memory)
        origin = entry if change is None else changed.lazily(entry, change, torch.device(device))
        tensors.append(OutputTensor(entry.name, spec, origin))
    config = models.with_vocabulary(source.config, merge.rows) if merge.rows else source.config
    files = inputs_folder(source.path, folder)
    changed.write_changed(source.path, out, tensors, config, (RECORD, mark), files=files, progress=progress)


def _merge(folder: Path, source: Source) -> Merge:
    """The changes of an adapter to its base, from headers; only the values of a tied output head are read."""
    config = read_adapter_config(folder)
    _require_low_rank(folder, config)
    entries = _entries(folder)
    layers: dict[str, dict[str, Entry]] = {}
    whole: dict[str, Entry] = {}
    for name, entry in entries.items():
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part is not None:
            layers.setdefault(name.removesuffix(f".{part}"), {})[part] = entry
        elif "lora_" in name or "trainable_tokens" in name:
            raise UserError(f"{folder / WEIGHTS}: '{name}' is of an unsupported kind; merge it with PEFT")
        else:
            whole[name] = entry
    memory = models.memory_names(source.meta_model, [*(f"{name}.weight" for name in layers), *whole])
    changes: dict[str, Change] = {}
    tied, vocabulary, sizes = models.tied_names(source.meta_model), _vocabulary(source), dict[str, int]()
    for name, entry in whole.items():
        parameter = memory[name]
        if parameter in tied and parameter not in source.names and _same(entry, whole, memory, tied[parameter]):
            continue  # PEFT saves a shared matrix twice
        shape = _stored_shape(folder, name, parameter, source)
        if parameter in vocabulary and len(entry.spec.shape) == 2 and entry.spec.shape[1:] == shape[1:]:
            sizes[parameter] = entry.spec.shape[0]
        elif entry.spec.shape != shape:
            raise UserError(f"{folder / WEIGHTS}: '{name}' is {list(entry.spec.shape)}, the base's is {list(shape)}")
        changes[parameter] = _value(entry)
    rows = _rows(folder, source, sizes)
    for name, parts in layers.items():
        if fused := _experts(folder, config, name, parts, source):
            changes |= {parameter: low.merged for parameter, low in fused.items()}
            continue
        parameter = memory[f"{name}.weight"]
        shape = _stored_shape(folder, name, parameter, source)
        shape = (rows, *shape[1:]) if rows and parameter in vocabulary else shape
        low = _low(folder, config, name, parts, source, parameter, shape)
        changes[parameter] = _both(changes[parameter], low.merged) if parameter in changes else low.merged
    if not changes:
        raise UserError(f"{folder / WEIGHTS} has no adapter of any layer; give the folder that PEFT wrote")
    return Merge(changes, rows)


def _vocabulary(source: Source) -> list[str]:
    """Memory names of the stored weights with a row per token: the embedding's and the output head's."""
    names = (f"{models.embedding_name(source.meta_model)}.weight", f"{source.spec.lm_head}.weight")
    return [name for name in names if name in source.names]


def _same(entry: Entry, whole: Mapping[str, Entry], memory: Mapping[str, str], parameter: str) -> bool:
    """Whether a tensor of the adapter equals the one that it has for another parameter."""
    other = next((whole[name] for name in whole if memory[name] == parameter), None)
    return other is not None and torch.equal(tensor_files.read_tensor(entry), tensor_files.read_tensor(other))


def _rows(folder: Path, source: Source, sizes: Mapping[str, int]) -> int | None:
    """The rows of embedding and output head in an adapter that holds them fully (`sizes`); None: as many as in the base.

    Raises:
        UserError: the numbers of rows differ between the two, or its tokenizer has more tokens.
    """
    stored = {name: source.stored[source.names[name]].shape[0] for name in _vocabulary(source)}
    now = stored | dict(sizes)
    if len(set(now.values())) > 1 and now != stored:
        rows_of_each = ", ".join(f"'{name}' {count}" for name, count in now.items())
        raise UserError(
            f"{folder / WEIGHTS}: with the adapter embedding and output head have different rows ({rows_of_each}); merge it "
            "with PEFT into the model that it was trained on, which has the same number in both"
        )
    rows = next(iter(now.values()))
    if "tokenizer" in replaced(source.path, folder) and (
        beyond := models.unembedded(inputs_folder(source.path, folder), rows)
    ):
        raise UserError(
            f"{folder}: {beyond}; save the adapter with the embedding that it was trained with (modules_to_save, or "
            "save_embedding_layers=True), or remove its tokenizer files to use the base's"
        )
    return rows if now != stored else None


def _value(entry: Entry) -> Change:
    return lambda weight: tensor_files.read_tensor(entry).to(weight)


def _both(first: Change, then: Change) -> Change:
    return lambda weight: then(first(weight))


def _low(
    folder: Path,
    config: Mapping[str, Any],
    name: str,
    parts: Mapping[str, Entry],
    source: Source,
    parameter: str,
    shape: tuple[int, ...],
) -> Low:
    """The adapter of one layer. `name`: the layer's name in the adapter; `parts`: suffix of a tensor's name -> tensor;
    `shape`: that of the base's weight."""
    file, entries = folder / WEIGHTS, {_PARTS[part]: entry for part, entry in parts.items()}
    if not {"a", "b"} <= entries.keys():
        raise UserError(f"{file}: '{name}' lacks {'lora_A' if 'b' in entries else 'lora_B'}; copy the file again")
    module = source.meta_model.get_submodule(parameter.rpartition(".")[0])
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise UserError(f"{file}: '{name}' is a {type(module).__name__}, which is not merged; merge it with PEFT")
    a, b, magnitude = entries["a"], entries["b"], entries.get("magnitude")
    embedding, sides = isinstance(module, nn.Embedding), (b.spec.shape[:1], a.spec.shape[1:])
    rank, expected = a.spec.shape[0], sides[::-1] if embedding else sides
    if len(a.spec.shape) != 2 or not rank or b.spec.shape[1:] != (rank,) or expected[0] + expected[1] != shape:
        shapes = f"{list(a.spec.shape)} and {list(b.spec.shape)}"
        raise UserError(f"{file}: '{name}' has A and B of {shapes}, and the base's weight is {list(shape)}")
    if bool(config.get("use_dora")) != (magnitude is not None) or (magnitude and magnitude.spec.shape != shape[:1]):
        raise UserError(f"{file}: '{name}' and use_dora of the config do not match; copy both again")
    if magnitude and embedding:
        raise UserError(f"{file}: DoRA of an embedding, '{name}', is not merged; merge it with PEFT")
    return Low(a, b, _scale(folder, config, name, rank), magnitude, embedding)


def _experts(
    folder: Path, config: Mapping[str, Any], name: str, parts: Mapping[str, Entry], source: Source
) -> dict[str, Low]:
    """The adapters of a block's experts (memory names) from that of all of them, which PEFT nests if there are two; empty for
    another layer. Which of their two parameters it is follows from the shapes."""
    bare = name.replace(_WRAPPED.rstrip("."), "")
    leaf = f"{bare}.0.down_proj.weight"
    prefix = models.memory_names(source.meta_model, [leaf])[leaf].removesuffix("0.down_proj.weight")
    weights = {key.removeprefix(prefix): key for key in source.names if key.startswith(prefix)}
    count = sum(key.endswith(".down_proj.weight") for key in weights)
    if not count or f"{bare}.weight" in source.names:
        return {}
    shapes = {key: source.stored[source.names[memory]].shape for key, memory in weights.items()}
    a, b = (next((entry for part, entry in parts.items() if _PARTS[part] == side), None) for side in ("a", "b"))
    for parameter, matrices in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        (rows, columns), rank = shapes[f"0.{matrices[0]}.weight"], a.spec.shape[0] // count if a else 0
        fits = (
            a and a.spec.shape == (rank * count, columns) and b and b.spec.shape == (rows * len(matrices), rank * count)
        )
        if a and b and fits and rank:
            scale = _scale(folder, config, f"{bare}.{parameter}", rank)
            parts_of = {matrix: slice(at * rows, (at + 1) * rows) for at, matrix in enumerate(matrices)}
            return {
                weights[f"{number}.{matrix}.weight"]: Low(a, b, scale, expert=(number, count, part))
                for number in range(count)
                for matrix, part in parts_of.items()
            }
    raise UserError(
        f"{folder / WEIGHTS}: '{name}' does not fit the base's {count} experts; name its base by MODEL --adapter"
    )


def _scale(folder: Path, config: Mapping[str, Any], name: str, rank: int) -> float:
    """The factor of `B A` of a layer or parameter (its name in the adapter)."""
    alpha = _setting(folder, config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(f"{folder / CONFIG}: lora_alpha of '{name}' is {alpha!r}, and should be a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _setting(folder: Path, pattern: Any, name: str, default: Any) -> Any:
    """A layer's value in one of PEFT's patterns (suffix of a layer's name, or a regular expression for it -> value)."""
    for key, value in (pattern or {}).items() if isinstance(pattern, Mapping) else ():
        try:
            if re.match(rf"(.*\.)?({key})$", name):
                return value
        except re.error as error:
            raise UserError(
                f"{folder / CONFIG}: alpha_pattern '{key[:60]}' is not supported ({error}); name layers"
            ) from error
    return default


def _stored_shape(folder: Path, name: str, parameter: str, source: Source) -> tuple[int, ...]:
    """The shape of the base's tensor for a tensor or layer of the adapter."""
    if parameter in source.names:
        return source.stored[source.names[parameter]].shape
    if parameter in models.tied_names(source.meta_model):
        why = "shares the embedding's weights in the base, so that both would change"
        raise UserError(f"{folder / WEIGHTS}: '{name}' {why}; merge it with PEFT")
    raise UserError(
        f"{folder / WEIGHTS}: '{name}' has no place in {type(source.meta_model).__name__} (looked for '{parameter}'); "
        "name the base that the adapter was trained on: MODEL --adapter FOLDER"
    )


def _require_low_rank(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise `UserError` for an adapter that is more than low-rank updates of weights."""
    for key, plain in _PLAIN.items():
        value = config.get(key, plain[0])
        if value not in plain and value:
            raise UserError(f"{folder / CONFIG}: {key} {value!r} is not supported; merge the adapter with PEFT")
    start = str(config.get("init_lora_weights", "")).lower()
    if start.startswith(_OF_BASE):
        raise UserError(
            f"{folder / CONFIG}: init_lora_weights '{start}' changes the base's weights as well, which an adapter does not "
            "hold; convert it with PEFT (path_initial_model_for_weight_conversion), or merge it there"
        )


def _entries(folder: Path) -> dict[str, Entry]:
    """The adapter's tensors by their names without PEFT's prefix."""
    if not (folder / WEIGHTS).is_file():
        pickled = (
            "only pickled weights, which can run code when read" if (folder / "adapter_model.bin").is_file() else "none"
        )
        raise UserError(f"{folder} has {pickled} instead of {WEIGHTS}; save it with safe_serialization=True")
    names = [
        (plain if "lora_" in (plain := entry.name.removeprefix(_PREFIX)) else plain.replace(_WRAPPED, "."), entry)
        for entry in read_entries(folder / WEIGHTS)
        if _OF_BASE_MODULE not in entry.name
    ]
    # PEFT saves a fully trained embedding also under its name during training
    there = {name for name, _ in names}
    names = [
        (plain, entry) for name, entry in names if (plain := _TRAINED.sub(".", name)) == name or plain not in there
    ]
    entries = dict(names)
    if len(entries) < len(names):
        raise UserError(f"{folder / WEIGHTS} has two tensors of one name; save the adapter again")
    for name, entry in entries.items():
        if entry.spec.dtype not in FLOATS:
            raise UserError(f"{folder / WEIGHTS}: '{name}' is {entry.spec.dtype}; adapters are floats of 16 or 32 bits")
    return entries
