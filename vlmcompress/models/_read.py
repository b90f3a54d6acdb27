"""Read a model folder's config and the headers of its safetensors files, and check that these are whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmcompress.common import json_files
from vlmcompress.common.registry import FAMILIES as REGISTRY
from vlmcompress.common.tensor_files import INDEX, SINGLE, Entry, read_entries
from vlmcompress.errors import UserError
from vlmcompress.models._checks import check_claims, check_sizes, has_experts
from vlmcompress.models._experts import one_by_one
from vlmcompress.models._spec import ModelSpec

CONFIG_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Where formats keep their config besides config.json; a folder has those of its own format only."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def all_specs() -> list[ModelSpec]:
    """The specs of all families, sorted by name."""
    return [REGISTRY.get(name).SPEC for name in REGISTRY.names()]


def family_of(config: Mapping[str, Any]) -> ModelSpec | None:
    """The family of a config.json by its model type and, of two with one type, by whether it has experts; None: of none."""
    named = [spec for spec in all_specs() if config.get("model_type") in spec.model_types]
    fitting = [spec for spec in named if bool(spec.experts) == has_experts(config)]
    return next(iter(fitting + named), None)


def mixture(config: Mapping[str, Any]) -> ModelSpec | None:
    """The family of a config.json whose decoder may be a mixture of experts; None: it is of another family, or of none."""
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
    return content


def has_weights(path: Path) -> bool:
    """Whether a folder has weight files, whole or not."""
    return path.is_dir() and (any(path.glob("*.safetensors")) or (path / INDEX).is_file())


def read_config(path: str | Path, weights: bool = True) -> dict:
    """Read config.json of the model in `path`, after checking that the folder holds whole safetensors files.

    Args:
        weights: False: weight files may be missing.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"model folder {path} does not exist; give the path of a downloaded checkpoint")
    if not path.is_dir():
        raise UserError(f"{path} is a file; give the folder that holds config.json and the safetensors files")
    if not any(path.iterdir()):
        raise UserError(f"model folder {path} is empty; download the checkpoint into it")
    if not (path / "config.json").is_file() and (path / "params.json").is_file():
        raise UserError(
            f"{path} is in Mistral's own format (params.json), as Pixtral is published; give a folder in that of transformers "
            "(config.json), of the type 'llava' or 'mistral3'"
        )
    refuse_adapter(path)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json; give the folder of a Hugging Face checkpoint")
    config = read_json(path / "config.json", "config")
    check_sizes(config, path / "config.json")
    if weights:
        check_claims(config, len(tensor_headers(path)), path / "config.json")
    return config


def refuse_adapter(path: Path) -> None:
    """Raise `UserError` for the folder of a LoRA adapter, which is a model together with its base alone."""
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        merge = f"vlmcompress quantize {path} -o MERGED --scheme none"
        raise UserError(f"{path} is a LoRA adapter and no model; write the merged one first, by {merge}")


def check_files(path: str | Path) -> None:
    """Raise `UserError` for a model folder with visible files that cannot be copied: devices, pipes, broken links."""
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for file in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
            if not file.is_file():
                raise UserError(f"{file} is a device, a pipe or a link that leads nowhere; remove it from the folder")


def shards(path: str | Path) -> list[Path]:
    """The safetensors files of the checkpoint in `path`, in order; those of the index where there is one."""
    path = Path(path)
    index = path / INDEX
    if index.is_file():
        return [path / name for name in sorted(set(_weight_map(index).values()))]
    single = path / SINGLE
    files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        raise UserError(f"{path} has {len(files)} safetensors files but no {INDEX}; download the checkpoint again")
    if files:
        return files
    if any(any(path.glob(pattern)) for pattern in _PICKLES):
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
    path = Path(path)
    entries: dict[str, Entry] = {}
    for file in shards(path):
        if not file.is_file():
            raise UserError(f"weight file {file} is missing; download it again")
        for entry in read_entries(file):
            if entry.name in entries:
                raise UserError(
                    f"tensor '{entry.name}' is in {entries[entry.name].file.name} and in {file.name}; download again"
                )
            entries[entry.name] = entry
    index = path / INDEX
    if index.is_file():
        for name, shard in _weight_map(index).items():
            if name not in entries or entries[name].file.name != shard:
                raise UserError(f"{index} puts tensor '{name}' into {shard}, which lacks it; download again")
    return {
        name: {"dtype": entry.spec.dtype, "shape": list(entry.spec.shape), "file": entry.file.name}
        for name, entry in _one_by_one(path, list(entries.values())).items()
    }


def stored_tensors(path: str | Path) -> dict[str, Entry]:
    """Name of every tensor -> where its bytes are, in order; fused experts of our families one by one."""
    return _one_by_one(Path(path), [entry for file in shards(path) for entry in read_entries(file)])


def stored_bytes(path: str | Path) -> int:
    """Bytes of all tensors of the checkpoint in `path`."""
    return sum(entry.spec.nbytes for entry in stored_tensors(path).values())


def _one_by_one(path: Path, entries: list[Entry]) -> dict[str, Entry]:
    """The stored tensors of a folder by name, fused experts one by one."""
    config = path / "config.json"
    spec = mixture(read_json(config, "config")) if config.is_file() else None
    return {entry.name: entry for entry in (one_by_one(entries, spec) if spec else entries)}


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise UserError(f"{index} has no usable weight_map; download it again")
    if any(Path(shard).name != shard for shard in weight_map.values()):
        raise UserError(f"{index} points outside its folder; download it again")
    return weight_map


def quantization_block(path: Path, config: Mapping[str, Any]) -> Any:
    """The quantization config of a checkpoint, of config.json or of the first file that has one; empty where none has."""
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
    method = str(block.get("quant_method") or name or "").lower()
    return "modelopt" if method.startswith("modelopt") else method


def refuse_quantized(path: str | Path, config: Mapping[str, Any]) -> None:
    """Raise `UserError` for a checkpoint that is quantized already. `config`: its config.json."""
    block = quantization_block(Path(path), config)
    if not block:
        return
    method = quantization_method(block) if isinstance(block, Mapping) else ""
    kind = f"quantized already ({method})" if method else "quantized already"
    again = "; of FP8, --from-quantized quantizes what it stands for" if _is_fp8(block) else ""
    raise UserError(
        f"{path} is {kind}; give the 16-bit original (export and convert change only the format of this one{again})"
    )


def _is_fp8(block: Any) -> bool:
    """Whether a quantization config says that all its weights are FP8."""
    if not isinstance(block, Mapping):
        return False
    groups = block.get("config_groups")
    kinds = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    if kinds and all(isinstance(weights, Mapping) for weights in kinds):
        return all((weights.get("type"), weights.get("num_bits")) == ("float", 8) for weights in kinds)
    return block.get("quant_method") == "fp8"
