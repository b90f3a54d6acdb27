"""A LoRA adapter's folder as PEFT writes it: its base model, and its files other than weights.

`export.adapter` reads and merges its tensors. Trainers save tokenizer, processor and chat template next to them. As the
adapter was trained with these files, they replace the base's.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from vlmcompress.utils import hub, identity, json_files, model_folder, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.model_folder import ADAPTER_CONFIG as CONFIG

_VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_NAME = "base_model_name_or_path"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The content of the adapter's config. Raises `UserError` where it can't be read."""
    content: dict[str, Any] = schema.read_typed(
        dict[str, Any], folder / CONFIG, "give the folder that PEFT's save_pretrained wrote"
    )
    return content


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
    files = [folder / place for folder in (model, adapter) for place in model_folder.processing_files(folder)]
    return _overlaid(model, adapter, tuple(kinds), tuple(identity.unchanged(files)))


@functools.cache
def _overlaid(model: Path, adapter: Path, kinds: tuple[str, ...], _state: tuple[tuple[str, int, int], ...]) -> Path:
    """The temporary folder of `inputs_folder`. `_state`: state of both folders' files, so that a change makes a new
    one."""
    folder = Path(tempfile.mkdtemp(prefix="vlmcompress-inputs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    files = {place: model / place for place in (Path("config.json"), *model_folder.companions(model))}
    for kind in kinds:
        brought = model_folder.processing_files(adapter, kind)
        if kind != "tokenizer" or any(place.name in _VOCABULARY for place in brought):  # else: settings of the base's
            for place in model_folder.processing_files(model, kind):
                del files[place]
        files |= {place: adapter / place for place in brought}
    for place, file in files.items():
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / place)
    template = _inline_template(adapter if "chat template" in kinds else model)
    if template and not model_folder.processing_files(folder, "chat template"):
        (folder / "chat_template.jinja").write_bytes(template)
    return folder


def _content(folder: Path, kind: str) -> dict[str, bytes]:
    """Name -> content of the files of a kind. A chat template within tokenizer_config.json counts as a template file."""
    files = {str(place): (folder / place).read_bytes() for place in model_folder.processing_files(folder, kind)}
    if kind == "chat template" and not files and (template := _inline_template(folder)):
        files["chat_template.jinja"] = template
    return files


def _inline_template(folder: Path) -> bytes | None:
    """The chat template that older releases of transformers keep in tokenizer_config.json."""
    try:
        template = json_files.read(folder / "tokenizer_config.json").get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return template.encode() if isinstance(template, str) else None


def other_base(model: Path, folder: Path) -> str | None:
    """The base that the adapter names, if its folder or the last part of its name is not that of `model`; else None."""
    name = read_adapter_config(folder).get(_NAME)
    if not isinstance(name, str) or not name or Path(name).resolve() == model.resolve():
        return None
    here = hub.display_path(model).partition("@")[0]
    return None if Path(name).name.lower() == Path(here).name.lower() else name


def base_of(folder: Path) -> str:
    """The name of the adapter's base: an existing folder, or an id on the Hub. Raises `UserError` otherwise."""
    name = read_adapter_config(folder).get(_NAME)
    if isinstance(name, str) and name and (Path(name).is_dir() or hub.parse_repository(name)):
        return name
    why = f"names the base {name!r}, which does not exist" if name else "names no base"
    raise UserError(f"the adapter {folder} {why}; name it: MODEL --adapter {folder}")
