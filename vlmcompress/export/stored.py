"""A quantized checkpoint, ours or another tool's, read layer by layer: codes and scales as stored.

The format is found in config.json's `quantization_config`, or in the separate file of some tools. Before any tensor is read,
all tensors of quantized layers must exist in the shapes of their schemes, and all others must belong to the model and be
floats: codes without scales are no weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vlmcompress import models
from vlmcompress.export import auto_round
from vlmcompress.export.formats import Reader
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.export.write import Quantized
from vlmcompress.models import FloatType, ModelSpec
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.utils import tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import FORMATS
from vlmcompress.utils.tensor_headers import FLOATS, Entry, Spec

_OPTIONAL = "g_idx"  # some writers omit it if inputs are in order
_SCALES = ("scales", "weight_scale")
_FACTORS = (*_SCALES, "weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale")
_NUMBERS = (*FLOATS, "F64")
_KV_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")


@dataclass(frozen=True)
class StoredLayer:
    """A quantized linear layer on disk.

    Attributes:
        prefix: its name on disk, with a dot at the end.
        shape: `[out, in]` of its weight.
        scheme: its number formats.
        entries: local name -> the tensor's entry in its file.
    """

    prefix: str
    shape: tuple[int, int]
    scheme: Scheme
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Stored(Mapping[str, Quantized]):
    """A quantized checkpoint: linear layer (memory name) -> weight, scheme, scale of static activations; read lazily.

    Attributes:
        path: its folder.
        config: the content of config.json.
        block: the format's config block.
        format: the format's name; `reader` reads it.
        spec: the model's family; `meta_model` the unquantized model, shapes only.
        layers: quantized linear layer (memory name) -> how it is stored.
        names: memory name of a parameter -> its name on disk; for a quantized weight, the name it would have unquantized.
        kv_scales: attention module's name on disk, with a dot at the end -> scales of keys and of values.
        entries: all tensors, in order.
    """

    path: Path
    config: dict[str, Any]
    block: dict[str, Any]
    format: str
    reader: Reader
    spec: ModelSpec
    meta_model: PreTrainedModel
    layers: dict[str, StoredLayer]
    names: dict[str, str]
    kv_scales: dict[str, tuple[Entry, Entry]]
    entries: list[Entry]

    @staticmethod
    def of(path: Path) -> Stored:
        """Open the quantized checkpoint in a folder.

        Raises:
            UserError: it is not quantized, of an unsupported format or family, damaged, or inconsistent.
        """
        config = models.read_config(path)
        block = models.quantization_block(path, config)
        if not block and (comfy := [name for name in models.stored_tensors(path) if name.endswith(".scale_weight")]):
            raise UserError(
                f"'{comfy[0]}' is a scale as ComfyUI writes them, and {path / 'config.json'} says nothing of FP8; add "
                '"quantization_config": {"quant_method": "fp8"} to it'
            )
        if not block:
            raise UserError(f"{path} is not quantized; quantize it (--scheme none keeps its weights)")
        if not isinstance(block, dict):
            raise UserError(
                f"quantization_config of {path / 'config.json'} is not a JSON object; restore it from the source"
            )
        if models.quantization_method(block) == auto_round.METHOD:
            block = auto_round.translated(block)
        name, reader = _format(path, block)
        try:
            reader.require_supported(block)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"quantization_config is not valid for {name} ({error}); restore it from the source"
            ) from error
        spec = models.spec_for(config)
        meta_model = models.build_meta_model(path)
        entries = list(models.stored_tensors(path).values())
        if not (path / MANIFEST).is_file():
            entries = reader.renamed(entries, meta_model.state_dict(keep_vars=True))
        kv_scales = _kv_scales(entries, reader)
        if not kv_scales and (
            key := next((key for key in _KV_KEYS if (block.get("quantization") or block).get(key)), "")
        ):
            raise UserError(
                f"quantization_config has {key}, but the checkpoint has no scales of keys and values; remove it from the "
                "config to read only the weights"
            )
        # A tensor belongs to a quantized layer or the KV cache, or is plain and must match the model in name and shape.
        cached = {entry.name for pair in kv_scales.values() for entry in pair}
        layers = _layers(meta_model, spec, [e for e in entries if e.name not in cached], block, reader)
        inside = {entry.name for layer in layers.values() for entry in layer.entries.values()}
        plain = [entry.name for entry in entries if entry.name not in inside | cached]
        names = models.disk_names(meta_model, [*plain, *(f"{layer.prefix}weight" for layer in layers.values())])
        stored = Stored(path, config, block, name, reader, spec, meta_model, layers, names, kv_scales, entries)
        state, specs = meta_model.state_dict(keep_vars=True), {entry.name: entry.spec for entry in entries}
        packed = {f"{layer}.weight" for layer in layers}
        for memory, disk in names.items():
            if memory not in packed and state[memory].is_floating_point() and specs[disk].dtype not in _NUMBERS:
                raise UserError(
                    f"tensor '{disk}' has codes ({specs[disk].dtype}) without scales, so its weights are unknown; "
                    "download the checkpoint again"
                )
            if memory not in packed and math.prod(specs[disk].shape) != math.prod(state[memory].shape):
                shapes = f"{list(specs[disk].shape)} on disk, {list(state[memory].shape)} in the model"
                raise UserError(f"tensor '{disk}' has shape {shapes}; config.json and weights do not match")
        return stored

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        """Quantized linear layer (memory name) -> its scheme."""
        return {name: layer.scheme for name, layer in self.layers.items()}

    @cached_property
    def float_type(self) -> FloatType:
        """The type of the model's floating tensors outside quantized layers."""
        packed = {entry.name for layer in self.layers.values() for entry in layer.entries.values()}
        plain = [entry.spec for entry in self.entries if entry.name not in packed]
        return FloatType.of(self.config, plain, spec=self.spec, model=self.meta_model)

    @cached_property
    def scale_dtype(self) -> torch.dtype | None:
        """The model's type if it can represent all scales exactly, whatever their stored type; else None (keep that type).

        Engines load scales in the model's type; transformers computes in the stored type.
        """
        dtype = self.float_type.dtype
        for layer in self.layers.values():
            for local, entry in layer.entries.items():
                # Global scales are float32 in every format and do not belong to single weights.
                kind = entry.spec.dtype
                if kind not in FLOATS or "global" in local or local == "weight_scale_2":
                    continue
                if tensor_files.DTYPES[kind] == dtype:
                    continue
                value = tensor_files.read_tensor(entry)
                if not torch.equal(value.to(dtype).float(), value.float()):
                    return None
        return dtype

    def scale_type(self, name: str) -> str:
        """safetensors' name of the type of a layer's scales after reading; from headers."""
        entries = self.layers[name].entries
        stored = next(entries[local].spec.dtype for local in _SCALES if local in entries)
        if self.scale_dtype is None or stored not in FLOATS:
            return stored
        return Spec.of(torch.empty(0, dtype=self.scale_dtype)).dtype

    def __getitem__(self, name: str) -> Quantized:
        layer = self.layers[name]
        tensors = {local: tensor_files.read_tensor(entry) for local, entry in layer.entries.items()}
        try:
            weight, input_scale = self.reader.read(tensors, layer.scheme, layer.shape)
        except UserError as error:
            raise UserError(f"{layer.prefix}*: {error}") from error
        self._require_scales(layer, weight, input_scale)
        if self.scale_dtype and weight.scale.dtype.itemsize > 1:
            weight = replace(weight, scale=weight.scale.to(self.scale_dtype))
        return weight, layer.scheme, input_scale

    def require_scales(self) -> None:
        """Raise `UserError` for a layer with a scale that makes its weights wrong. Codes are read only under a scale of 0."""
        for name, layer in self.layers.items():
            for local in _FACTORS:
                if entry := layer.entries.get(local):
                    value = tensor_files.read_tensor(entry).float()
                    if entry.spec.dtype == "U8":  # exponents; 255 is NaN
                        right = value < 255
                    elif layer.scheme.weights.kind == "int":
                        right = value.isfinite() & (value != 0)
                    else:
                        right = value.isfinite() & (value >= 0 if entry.spec.dtype not in FLOATS else value > 0)
                    if not right.all():
                        self[name]

    def _require_scales(self, layer: StoredLayer, weight: QTensor, input_scale: Tensor | None) -> None:
        """Raise `UserError` for scales that are NaN or infinite; 0 over other codes than 0; or negative where codes are floats;
        and for codes that are NaN.

        Of integers, auto-round writes negative scales. In NVFP4 a small group's scale may round to 0.
        """
        step, globally = weight.step.float(), weight.global_scale
        if not step.isfinite().all() or globally is not None and not globally.isfinite().all():
            problem = "NaN or infinite"
        elif weight.q.is_floating_point() and not tensor_files.all_finite(weight.q):
            problem = "over codes that are NaN"
        elif weight.format.kind == "float" and bool((step < 0).any()):
            problem = "negative"
        elif input_scale is not None and not bool((input_scale.isfinite() & (input_scale > 0)).all()):
            problem = "of inputs and not positive"
        elif not (weight.format.nvfp4 or weight.format.mx) and bool((step == 0).any()):
            units = replace(weight, scale=(step == 0).float())
            problem = "0 over codes that are not" if units.dequantize(torch.float32).any() else ""
        else:
            problem = ""
        if problem:
            name = next(layer.entries[local].name for local in _SCALES if local in layer.entries)
            raise UserError(f"{layer.prefix}*: a scale in '{name}' is {problem}; download the checkpoint again")

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def _format(path: Path, block: Mapping[str, Any]) -> tuple[str, Reader]:
    """Name and reader of a config block's format. Raises `UserError` for an unsupported one."""
    method = models.quantization_method(block)
    versions = {block[key] for key in ("checkpoint_format", "format") if block.get(key)} if method == "gptq" else set()
    if len(versions) > 1:
        raise UserError(f"{path}: checkpoint_format and format differ in quantization_config; correct it")
    if "gptq_v2" in versions:
        method = "gptq-v2"
    for name in FORMATS.names():
        format = FORMATS.get(name)
        if method == format.METHOD and isinstance(format, Reader):
            return name, format
    read = ", ".join([auto_round.METHOD, *FORMATS.names()])
    raise UserError(f"{path} has quantization of the unsupported kind '{method}'; supported are {read}")


def _kv_scales(entries: list[Entry], reader: Reader) -> dict[str, tuple[Entry, Entry]]:
    """Find the scales of an FP8 KV cache."""
    if reader.KV_SCALES is None:
        return {}
    keys, values = reader.KV_SCALES
    by_name = {entry.name: entry for entry in entries}
    scales = {}
    for name in by_name:
        prefix = name.removesuffix(f".{keys}")
        if prefix != name and f"{prefix}.{values}" in by_name:
            scales[f"{prefix}."] = by_name[name], by_name[f"{prefix}.{values}"]
    return scales


def _layers(
    meta_model: PreTrainedModel, spec: ModelSpec, entries: list[Entry], block: Mapping[str, Any], reader: Reader
) -> dict[str, StoredLayer]:
    """Find the quantized linear layers, and check that their tensors exist in the right shapes."""
    matrices = models.matrices(meta_model)
    by_layer: dict[str, dict[str, Entry]] = {}
    memory = models.memory_names(meta_model, [entry.name for entry in entries])
    for entry in entries:
        module, _, local = memory[entry.name].rpartition(".")
        if module in matrices:
            local, tensors = reader.OTHER_NAMES.get(local, local), by_layer.setdefault(module, {})
            if local in tensors:
                raise UserError(
                    f"tensors '{tensors[local].name}' and '{entry.name}' are two names of the same tensor; remove one"
                )
            tensors[local] = entry
    layers = {}
    for module, tensors in by_layer.items():
        prefixes = {entry.name.rpartition(".")[0] for entry in tensors.values()}
        if len(prefixes) > 1:
            raise UserError(f"the tensors of {module} are split over {' and '.join(sorted(prefixes))}; download again")
        (prefix,) = prefixes
        rows, columns = matrices[module].get_parameter("weight").shape
        shape, names = (rows, columns), (module, prefix, spec.engine_name(module))
        try:
            scheme = reader.scheme_in(block, names, {local: entry.spec for local, entry in tensors.items()}, shape)
            if scheme is not None:
                _require_layer(prefix, tensors, reader.specs(scheme, *shape, "F16"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"layer {prefix}: config and tensors do not match ({error}); download again") from error
        if scheme is not None:
            stored = {local: entry for local, entry in tensors.items() if local != "bias"}
            layers[module] = StoredLayer(f"{prefix}.", shape, scheme, stored)
    if not layers:
        raise UserError("no linear layer is quantized as the config says; config.json and weights do not match")
    return layers


def _require_layer(prefix: str, tensors: Mapping[str, Entry], needed: Mapping[str, Spec]) -> None:
    """Compare a quantized layer's tensors with those of its scheme; scales may have any float type."""
    for local, spec in needed.items():
        if local not in tensors:
            if local == _OPTIONAL:
                continue
            raise UserError(f"tensor '{prefix}.{local}' of a quantized layer is missing; download the checkpoint again")
        actual = tensors[local].spec
        floats = actual.dtype in FLOATS and spec.dtype in FLOATS
        # Writers differ in dimensions of 1: a scale of the matrix is [], [1] or [1, 1].
        sides = [[side for side in shape if side != 1] for shape in (actual.shape, spec.shape)]
        if not (floats or actual.dtype == spec.dtype) or sides[0] != sides[1]:
            raise UserError(
                f"tensor '{tensors[local].name}' is {actual.dtype} {list(actual.shape)}, its scheme needs {spec.dtype} "
                f"{list(spec.shape)}; download the checkpoint again"
            )
    if extra := sorted(tensors.keys() - needed.keys() - {"bias"}):
        raise UserError(
            f"tensor '{tensors[extra[0]].name}' does not belong to a layer of this scheme; it cannot be converted"
        )
