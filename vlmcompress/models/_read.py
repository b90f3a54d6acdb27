"""Read a model folder's config and the headers of its safetensors files, and check that these are complete.

Experts that transformers saves as two tensors of a block become single layers (`one_by_one`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmcompress.models._images import side_length
from vlmcompress.models._requirements import (
    has_experts,
    in_transformers,
    require_architecture,
    require_known_experts,
    require_sizes,
    require_stored_layers,
    unknown_type_error,
)
from vlmcompress.models._spec import ModelSpec
from vlmcompress.utils import json_files, model_folder, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG_FILES, INDEX, PICKLES
from vlmcompress.utils.registry import FAMILIES as REGISTRY
from vlmcompress.utils.tensor_headers import Entry, Spec, read_entries

_RUN_TIME = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
)


def all_specs() -> list[ModelSpec]:
    """The specs of all families, sorted by name."""
    return [REGISTRY.get(name).SPEC for name in REGISTRY.names()]


def family_of(config: Mapping[str, Any]) -> ModelSpec | None:
    """The family of a config.json by its model type and, if two share it, by whether it has experts; None if there is none."""
    named = [spec for spec in all_specs() if config.get("model_type") in spec.model_types]
    # Some types have a dense and a mixture variant, whose layers differ: two families of one model type.
    fitting = [spec for spec in named if bool(spec.experts) == has_experts(config)]
    return next(iter(fitting + named), None)


def spec_for(config: dict) -> ModelSpec:
    """The family of a config.json, by its `model_type`. Raises `UserError` if there is none, or if the config is ambiguous."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError("config.json has no model_type; give the folder of a Hugging Face checkpoint")
    spec = family_of(config)
    if spec is None:
        raise unknown_type_error(config, [name for spec in all_specs() for name in spec.model_types])
    require_architecture(config)
    require_known_experts(config, spec)
    return spec


def require_model_type(config: Mapping[str, Any]) -> None:
    """Raise `UserError` for a config.json with a model type that no family here has, nor transformers."""
    if isinstance(config.get("model_type"), str) and family_of(config) is None and not in_transformers(config):
        raise unknown_type_error(config, [name for spec in all_specs() for name in spec.model_types])


def mixture(config: Mapping[str, Any]) -> ModelSpec | None:
    """The family of a config.json if its decoder may be a mixture of experts; else None."""
    spec = family_of(config)
    return spec if spec and spec.experts else None


def read_json(path: Path, what: str) -> dict:
    """Read the JSON object in `path`. `what` names the file in the message."""
    try:
        content = json_files.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{what} {path} is not readable JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{what} {path} holds no JSON object; download it again")
    if path.name == "config.json":
        schema.require_value(model_folder.Config, content, f"{what} {path}", "restore it from the source")
    return content


def read_config(path: str | Path, weights: bool = True) -> dict:
    """Read config.json of the model in `path`, after checking that the folder holds complete safetensors files.

    Args:
        weights: whether weight files must exist.
    """
    path = Path(path)
    model_folder.require_model(path)
    require_no_adapter(path)
    config = _normal(read_json(path / "config.json", "config"))
    require_sizes(config, path / "config.json")
    if weights:
        require_stored_layers(config, len(tensor_headers(path)), path / "config.json")
    return config


def _normal(config: Mapping[str, Any]) -> dict[str, Any]:
    """Normalize the content of a config.json.

    A quantization config is moved to the top level from all places where vLLM 0.32 looks for it (`get_quant_config` in
    `model_executor/model_loader/weight_utils.py`). The attention implementation is removed, as the caller chooses it: a config
    that names a kernel that is not installed could not be opened.
    """
    changed = {key: value for key, value in config.items() if key not in (*_RUN_TIME, "compression_config")}
    for key, part in changed.items():
        if isinstance(part, Mapping):
            changed[key] = {name: value for name, value in part.items() if name not in _RUN_TIME}
    text = changed.get("text_config")
    nested = text.pop("quantization_config", None) if isinstance(text, dict) else None
    block = config.get("quantization_config") or nested or config.get("compression_config")
    numbers = changed.pop("quantization", None)  # MLX's, which its tools repeat as quantization_config
    if isinstance(numbers, Mapping) and numbers and "quant_method" not in (block or {}):
        block = {"quant_method": "mlx", **numbers}
    return changed | ({"quantization_config": block} if block else {})


def require_no_adapter(path: Path) -> None:
    """Raise `UserError` for the folder of a LoRA adapter, which is a model only together with its base."""
    if model_folder.is_adapter(path):
        merge = f"vlmcompress quantize {path} -o MERGED --scheme none"
        raise UserError(f"{path} is a LoRA adapter and no model; write the merged one first, by {merge}")


def shards(path: str | Path) -> list[Path]:
    """The weight files of the model in `path`, in order (`utils.model_folder`). Raises `UserError` if there is none."""
    path = Path(path)
    if files := model_folder.weight_files(path):
        return files
    if any(any(path.glob(pattern)) for pattern in PICKLES):
        raise UserError(
            f"{path} has only pickled weights (.bin/.pt), which can run code when read; convert them with "
            "transformers' save_pretrained (it writes safetensors)"
        )
    if any(path.glob("*.gguf")):
        raise UserError(
            f"{path} has GGUF files, which are written and not read; give the checkpoint that they were made from"
        )
    raise UserError(f"{path} has no *.safetensors file; download the weights into it")


def tensor_headers(path: str | Path) -> dict[str, dict]:
    """Map the name of every tensor to `{"dtype", "shape", "file"}`, from the headers alone; names as in `stored_tensors`.

    Raises `UserError` when a shard is missing, cut short or garbled, or when the index disagrees with the shards.
    """
    return {
        name: {"dtype": entry.spec.dtype, "shape": list(entry.spec.shape), "file": entry.file.name}
        for name, entry in stored_tensors(path).items()
    }


def stored_tensors(path: str | Path) -> dict[str, Entry]:
    """Name of every tensor -> location of its bytes, in order; fused experts of supported families as one entry each.

    If a tensor is in two files, the index decides which one is used. Raises `UserError` as `tensor_headers`.
    """
    path = Path(path)
    index, files = path / INDEX, shards(path)
    places = model_folder.weight_map(index) if index.is_file() else {}
    entries: dict[str, Entry] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"weight file {file} is missing; download it, or save the model again")
        for entry in read_entries(file):
            # The index says which of two the author meant; engines may take the other, which `asides` tells.
            if places.get(entry.name, file.name) != file.name:
                continue  # stale
            if entry.name in entries:
                raise UserError(
                    f"tensor '{entry.name}' is in {entries[entry.name].file.name} and in {file.name}, and {INDEX} names "
                    "neither; save the model again"
                )
            entries[entry.name] = entry
    for name, place in places.items():
        if name not in entries:
            raise UserError(f"{index} puts tensor '{name}' into {place}, which lacks it; save the model again")
    config = path / "config.json"
    spec = mixture(read_json(config, "config")) if config.is_file() else None
    listed = list(entries.values())
    return {entry.name: entry for entry in (one_by_one(listed, spec) if spec else listed)}


def asides(path: str | Path) -> list[str]:
    """Messages about what a model's folder holds and is not applied: weights of something else, a tokenizer's limits."""
    path, lines = Path(path), []
    tokenizer = path / "tokenizer.json"
    for key in ("truncation", "padding") if tokenizer.is_file() else ():
        if read_json(tokenizer, "tokenizer").get(key):
            lines.append(
                f"tokenizer.json has another tool's {key}, which is not applied here; engines may apply it: set {key} to null"
            )
    if model_folder.adapter_left(path):
        lines.append(
            f"{ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} lie next to the whole model and are not applied; if they are not merged "
            "into it, give the folder as --adapter, too"
        )
    places = model_folder.weight_map(path / INDEX) if (path / INDEX).is_file() else {}
    files = shards(path) if places else []
    named = [(entry.name, file.name) for file in files for entry in read_entries(file)]
    if stale := sorted({name for name, file in named if places.get(name, file) != file}):
        lines.append(
            f"{len(stale)} tensors are stored twice, first '{stale[0]}'; those are taken that {INDEX} names, engines that do "
            "not look there may take the others"
        )
    return lines


def checkpoint_bytes(path: str | Path) -> int:
    """Bytes of all tensors of the checkpoint in `path`."""
    return sum(entry.spec.nbytes for entry in stored_tensors(path).values())


def quantization_block(path: Path, config: Mapping[str, Any]) -> Any:
    """The quantization config of a checkpoint, from config.json or the first other file that has one; empty if there is
    none."""
    block = config.get("quantization_config")
    for name in CONFIG_FILES:
        if not block and (path / name).is_file():
            block = read_json(path / name, "config")
    return block or {}


def quantization_method(block: Mapping[str, Any]) -> str:
    """The method that a quantization config names, in lower case: `awq`, `gptq`, `compressed-tensors`, `modelopt`, ...; "" for
    none."""
    producer = block.get("producer")
    name = producer.get("name") if isinstance(producer, Mapping) else None
    # ModelOpt's own file has no quant_method, only its producer; exports of it have `modelopt`, `modelopt_fp4`, ...
    method = str(block.get("quant_method") or name or "").lower()
    return "modelopt" if method.startswith("modelopt") else method


def require_unquantized(path: str | Path, config: Mapping[str, Any]) -> None:
    """Raise `UserError` for a checkpoint that is quantized already. `config`: its config.json."""
    block = quantization_block(Path(path), config)
    if not block:
        return
    method = quantization_method(block) if isinstance(block, Mapping) else ""
    kind = f"quantized already ({method})" if method else "quantized already"
    again = "; of FP8, --from-quantized quantizes what it stands for" if _is_fp8(block) else ""
    raise UserError(f"{path} is {kind}; give the 16-bit original (export changes only the format of this one{again})")


def _is_fp8(block: Any) -> bool:
    """Whether a quantization config says that all its weights are FP8."""
    if not isinstance(block, Mapping):
        return False
    groups = block.get("config_groups")
    kinds = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    if kinds and all(isinstance(weights, Mapping) for weights in kinds):
        return all((weights.get("type"), weights.get("num_bits")) == ("float", 8) for weights in kinds)
    return block.get("quant_method") == "fp8"


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


def patch_side(config: Any) -> int:
    """The side of a patch, in pixels."""
    return side_length(config.vision_config.patch_size)


def block_side(config: Any) -> int:
    """Side of the square of patches that form one token (`Images.token_side`); 1 if a patch is a token."""
    token_side = spec_for({"model_type": config.model_type}).images.token_side
    return token_side(config) if token_side else 1


def tile_grid(config: Any) -> tuple[int, int, int]:
    """The grid of one tile, or of an image where all have one size, after the pixel shuffle or the pooling."""
    size, unit = config.vision_config.image_size, patch_side(config) * block_side(config)
    rows, columns = size if isinstance(size, list | tuple) else (size, size)
    return (1, rows // unit, columns // unit)
