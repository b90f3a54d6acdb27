"""A LoRA adapter's folder as PEFT writes it: its base model, and its files other than weights.

`export.adapter` reads and merges its tensors. Trainers save tokenizer, processor and chat template next to them. As the
adapter was trained with these files, they replace the base's.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from vlmcompress.utils import hub, json_files, model_folder, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.model_folder import ADAPTER_CONFIG as CONFIG

_VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_NAME = "base_model_name_or_path"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The content of the adapter's config. Raises `UserError` where it can't be read."""
    remedy = "give the folder that PEFT's save_pretrained wrote"
    return dict(schema.read_typed(dict[str, Any], folder / CONFIG, remedy))


def replaced(model: Path, adapter: Path | None) -> list[str]:
    """Those of tokenizer, processor and chat template that the adapter replaces."""
    if adapter is None:
        return []
    contents = {kind: _content(adapter, kind) for kind in model_folder.PROCESSING}
    return [kind for kind, content in contents.items() if content and content != _content(model, kind)]


def inputs_folder(model: Path, adapter: Path | None) -> Path:
    """A folder with `model`'s config.json and its files other than weights, where an adapter's replace them: `model`
    itself, or a temporary folder with copies, removed when this process ends."""
    kinds = replaced(model, adapter)
    if adapter is None or not kinds:
        return model
    places = (Path("config.json"), *model_folder.companions(model))
    files = {str(place): (model / place).read_bytes() for place in places} | _content(model, "chat template")
    for kind in kinds:
        brought = _content(adapter, kind)
        # Tokenizer files without a vocabulary are settings of the base's tokenizer, and join its files.
        if kind != "tokenizer" or any(Path(name).name in _VOCABULARY for name in brought):
            files = {name: content for name, content in files.items() if name not in _content(model, kind)}
        files |= brought
    return _written(tuple(files.items()))


@functools.cache
def _written(files: tuple[tuple[str, bytes], ...]) -> Path:
    """A temporary folder of files (place, content)."""
    folder = Path(tempfile.mkdtemp(prefix="vlmcompress-inputs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for place, content in files:
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_bytes(content)
    return folder


def _content(folder: Path, kind: str) -> dict[str, bytes]:
    """Name -> content of the files of a kind. A chat template within tokenizer_config.json counts as a template file."""
    files = {str(place): (folder / place).read_bytes() for place in model_folder.processing_files(folder, kind)}
    if kind == "chat template" and not files:  # older releases of transformers keep it in tokenizer_config.json
        with contextlib.suppress(OSError, ValueError, AttributeError):
            template = json_files.read(folder / "tokenizer_config.json").get("chat_template")
            files = {"chat_template.jinja": template.encode()}  # AttributeError for another value than text
    return files


def notes(model: Path, adapter: Path | None) -> list[str]:
    """Notes about files of a model that its adapter replaces, and about another base that the adapter names."""
    if adapter is None:
        return []
    kinds = replaced(model, adapter)
    lines = [f"the adapter's {' and '.join(kinds)} replaced the base's"] if kinds else []
    base = read_adapter_config(adapter).get(_NAME)
    names = {Path(name).name.lower() for name in (str(model), hub.display_path(model).partition("@")[0])}
    if isinstance(base, str) and base and Path(base).name.lower() not in names:
        lines.append(f"the adapter was trained on {base}; on another model its changes are wrong, even if shapes fit")
    return lines


def base_of(folder: Path) -> str:
    """The name of the adapter's base: an existing folder, or an id on the Hub. Raises `UserError` otherwise."""
    name = read_adapter_config(folder).get(_NAME)
    if isinstance(name, str) and name and (Path(name).is_dir() or hub.parse_repository(name)):
        return name
    why = f"names the base {name!r}, which does not exist" if name else "names no base"
    raise UserError(f"the adapter {folder} {why}; name it: MODEL --adapter {folder}")
