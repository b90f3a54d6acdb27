"""A LoRA adapter's folder as PEFT writes it: where it is told from a model's, and which base it names.

What is in it is read by `checkpoint.adapter`, which merges it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmcompress.common import hub, identity, json_files
from vlmcompress.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "base_model_name_or_path"


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """The content of the adapter's config. Raises `UserError` where it can't be read."""
    path = folder / CONFIG
    try:
        content = json_files.read(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not readable ({error}); give the folder that PEFT's save_pretrained wrote"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings; give the folder that PEFT's save_pretrained wrote")
    return content


def sha256(folder: Path | None) -> str | None:
    """SHA-256 of the weights of an adapter; None for None."""
    return None if folder is None else identity.sha256(folder / WEIGHTS)


def base_of(folder: Path) -> str:
    """The name of the adapter's base: a folder that there is, or an id on the Hub. Raises `UserError` for another one."""
    name = read_config(folder).get(_NAME)
    if isinstance(name, str) and name and (Path(name).is_dir() or hub.parse(name)):
        return name
    why = f"names the base {name!r}, which is not here" if name else "names no base"
    raise UserError(f"the adapter {folder} {why}; name it: MODEL --adapter {folder}")
