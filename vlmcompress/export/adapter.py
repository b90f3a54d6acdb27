"""Merge a LoRA adapter into its base by PEFT, one layer at a time, so that a large base is never held in memory.

PEFT builds its model around a base without values, places the adapter's tensors there, and merges a layer once that layer's
weight has been read: in float32, rounded to the type on disk. Fully trained parameters (`modules_to_save`, biases, an
embedding with rows for more tokens) replace the base's.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.export import changed
from vlmcompress.export.changed import Change
from vlmcompress.export.write import OutputTensor
from vlmcompress.models import Source
from vlmcompress.recipe.adapter import inputs_folder, read_adapter_config, replaced
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.identity import unchanged
from vlmcompress.utils.messages import foreign_errors
from vlmcompress.utils.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_files

RECORD = ".adapter.json"
# The settings that PEFT gets. Others are of training only, or name modules and files that PEFT would load.
_SETTINGS = ("r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "target_parameters")
# With these the adapter is more than a low-rank change.
_REFUSED = (
    *("fan_in_fan_out", "lora_bias", "layer_replication", "trainable_token_indices", "alora_invocation_tokens"),
    *("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "lora_ga_config", "monteclora_config"),
    "velora_config",
)
# Initial values that change the base's weights as well.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
_EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PREFIX = "base_model.model."
# Layer, tensor. Some releases of PEFT save fully trained modules by their names in training.
_NAME = re.compile(r"base_model\.model\.(.+?)\.(?:modules_to_save\.(?:default\.)?)?(lora_.+|base_layer\..+|[^.]+)$")


def write_merged(
    source: Source, folder: Path, out: Path, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write `source`, merged with the adapter in `folder`, to the folder `out`, unless it exists already.

    `progress` is called with (bytes written, total bytes). Raises `UserError` as `changes`.
    """
    read = sorted({entry.file for entry in source.entries.values()}) + adapter_files(folder)
    mark = json.dumps([source.config, unchanged(read)], sort_keys=True)
    if changed.has(out, RECORD, mark):
        return
    (merged, rows), tensors = changes(folder, source), []
    disk = {name: memory for memory, name in source.names.items()}
    for entry in source.entries.values():
        memory, spec = disk.get(entry.name, ""), entry.spec
        if memory in rows:
            spec = replace(spec, shape=(rows[memory], *spec.shape[1:]))
        change = merged.get(memory)
        origin = changed.lazily(entry, change, torch.device("cpu")) if change else entry
        tensors.append(OutputTensor(entry.name, spec, origin))
    config = models.with_vocabulary(source.config, max(rows.values())) if rows else source.config
    files = inputs_folder(source.path, folder)
    changed.write_changed(source.path, out, tensors, config, (RECORD, mark), files=files, progress=progress)


def changes(folder: Path, source: Source) -> tuple[dict[str, Change], dict[str, int]]:
    """The changes of an adapter to its base, none of whose weights is read.

    Returns:
        Parameter (memory name) -> function from the base's value to the merged one; and embedding and output head -> number of
        rows, if the adapter was trained with another vocabulary.

    Raises:
        UserError: the adapter is damaged, of another model, or of an unsupported kind.
    """
    from peft import LoraConfig, PeftModel
    from peft.utils import set_peft_model_state_dict

    settings = _settings(folder)
    fused = bool(settings.get("target_parameters"))  # of experts, which `source.meta_model` has one by one
    meta_model = models.build_meta_model(source.path, source.headers, supported_only=not fused)
    remedy = (
        "; save the adapter again, as safetensors, and name the base that it was trained on: MODEL --adapter FOLDER"
    )
    with (
        foreign_errors(f"PEFT can't merge {folder} into {type(meta_model).__name__}", remedy),
        models.quiet_transformers(),
        warnings.catch_warnings(action="ignore"),
    ):
        stored = load_file(folder / ADAPTER_WEIGHTS)
        kept = {name: tensor for name, tensor in stored.items() if ".original_module." not in name}  # else the base's
        tensors = _placed(kept, source, settings)
        whole = {name.replace(".base_layer.", "."): value for name, value in tensors.items() if "lora_" not in name}
        trained = {name.removeprefix(_PREFIX): value for name, value in whole.items()}
        if rows := _rows(folder, source, {name: len(value) for name, value in trained.items()}):
            meta_model.resize_token_embeddings(max(rows.values()), mean_resizing=False)
        # Parameters with the shapes they have and no memory, on the CPU, where PEFT then keeps the adapter.
        blank = torch.zeros(())
        for module in meta_model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(blank.expand(parameter.shape), requires_grad=False))
        wrapped = PeftModel(meta_model, LoraConfig(**settings, inference_mode=True), low_cpu_mem_usage=True)
        loaded: Any = set_peft_model_state_dict(wrapped, tensors, low_cpu_mem_usage=True)
        if unplaced := [*loaded.unexpected_keys, *(name for name in loaded.missing_keys if "lora_" in name)]:
            raise ValueError(f"{len(unplaced)} tensors are of no layer, or lacking, first '{unplaced[0]}'")
    merged: dict[str, Change] = {name: value.to for name, value in trained.items()}  # to the type of the base's
    merged |= _of_layers(wrapped.get_base_model(), source, trained)
    for name in merged.keys() - source.names.keys():
        value, shared = trained.get(name), trained.get(models.tied_names(source.meta_model).get(name, ""))
        if value is None or shared is None or not torch.equal(value, shared):  # else PEFT has saved one matrix twice
            why = "shares the embedding's weights in the base, so that both would change"
            raise UserError(f"{folder / ADAPTER_WEIGHTS}: '{name}' {why}; merge it with PEFT")
    return merged, rows


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of an adapter that PEFT gets. Raises `UserError` for one of an unsupported kind."""
    config = read_adapter_config(folder)
    refused = [key for key in _REFUSED if config.get(key)]
    refused += ["peft_type"] if config.get("peft_type") != "LORA" else []
    refused += (
        ["init_lora_weights"] if str(config.get("init_lora_weights")).lower().startswith(_CHANGE_THE_BASE) else []
    )
    if refused:
        what = f"{refused[-1]} {config.get(refused[-1])!r}"
        raise UserError(f"{folder / ADAPTER_CONFIG}: {what} is not supported; merge the adapter with PEFT")
    return {key: config[key] for key in _SETTINGS if key in config}


def _placed(tensors: Mapping[str, Tensor], source: Source, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The adapter's tensors by the names that its layers have in memory: like names on disk, they are those of the
    transformers version that trained it. So `settings` get the layers to adapt from here."""
    parts = {
        name: match for name, tensor in tensors.items() if (match := _NAME.match(name)) and tensor.isfinite().all()
    }
    if broken := tensors.keys() - parts.keys():
        raise ValueError(f"'{min(broken)}' holds NaN or infinity, or has no name of PEFT's")
    memory = models.memory_names(source.meta_model, {f"{match[1]}.weight" for match in parts.values()})
    layers = {name.removesuffix(".weight"): placed.removesuffix(".weight") for name, placed in memory.items()}
    parameters = {name for name, _ in source.meta_model.named_parameters(remove_duplicate=False)}
    adapted = {layers[match[1]] for match in parts.values() if match[2].startswith("lora_")}
    settings["target_modules"] = [name for name in adapted if f"{name}.weight" in parameters]
    for key in ("rank_pattern", "alpha_pattern"):
        settings[key] = {layers.get(name, name): value for name, value in (settings.get(key) or {}).items()}
    return {f"{_PREFIX}{layers[match[1]]}.{match[2]}": tensors[name] for name, match in parts.items()}


def _rows(folder: Path, source: Source, sizes: Mapping[str, int]) -> dict[str, int]:
    """The weights with a row per token (memory names) -> their rows with an adapter; empty: they are as in the base.

    `sizes` are the rows of fully trained parameters. Raises `UserError` if embedding and output head get different ones, or
    the adapter's tokenizer has more tokens.
    """
    names = (f"{models.embedding_name(source.meta_model)}.weight", f"{source.spec.lm_head}.weight")
    before = {name: source.stored[source.names[name]].shape[0] for name in names if name in source.names}
    rows = {name: sizes.get(name, count) for name, count in before.items()}
    remedy = "save the adapter with both that it was trained with (modules_to_save, or save_embedding_layers=True)"
    if rows != before and len(set(rows.values())) > 1:
        different = f"embedding and output head have different rows, {' and '.join(map(str, rows.values()))}"
        raise UserError(f"{folder / ADAPTER_WEIGHTS}: with it {different}; {remedy}")
    beyond = models.unembedded(inputs_folder(source.path, folder), rows[names[0]])
    if beyond and "tokenizer" in replaced(source.path, folder):
        raise UserError(f"{folder}: {beyond}; {remedy}, or remove its tokenizer files to use the base's")
    return rows if rows != before else {}


def _of_layers(model: nn.Module, source: Source, trained: Mapping[str, Tensor]) -> dict[str, Change]:
    """The changes of PEFT's layers. `trained`: parameter (memory name) -> value before it, if not the base's."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    delta = functools.lru_cache(maxsize=2)(lambda layer: layer.get_delta_weight("default").detach())

    def add_part(layer: Any, number: int, part: int, parts: int, weight: Tensor) -> Tensor:
        # The change of all experts of a block is `[experts, out, in]`, with the rows of gates before those of ups.
        return weight + delta(layer)[number].chunk(parts)[part]

    def merge(layer: Any, leaf: str, parameter: str, weight: Tensor) -> Tensor:
        base = layer.get_base_layer()
        value = trained.get(parameter, weight).to(torch.float32, copy=True)
        setattr(base, leaf, nn.Parameter(value, requires_grad=False))
        layer.merge()
        layer.merged_adapters.clear()
        merged: Tensor = getattr(base, leaf).detach()
        delattr(base, leaf)
        return merged

    changes: dict[str, Change] = {}
    layers: dict[str, Any] = {path: layer for path, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    for path, layer in layers.items():
        name = path.replace(".base_layer", "")
        leaf = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        if f"{name}.0.down_proj.weight" not in source.names:
            changes[f"{name}.{leaf}"] = functools.partial(merge, layer, leaf, f"{name}.{leaf}")
            continue
        matrices = _EXPERT_MATRICES[leaf]
        for number in range(layer.num_experts):
            for part, matrix in enumerate(matrices):
                change = functools.partial(add_part, layer, number, part, len(matrices))
                changes[f"{name}.{number}.{matrix}.weight"] = change
    return changes
