"""Tell from a checkpoint's config files whether its weights are quantized, and how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmcompress.errors import UserError
from vlmcompress.models._read import read_json

CONFIG_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Where formats keep their config besides config.json; a folder has those of its own format only."""


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
    raise UserError(
        f"{path} is {kind}; give the 16-bit original (export and convert change only the format of this one)"
    )
