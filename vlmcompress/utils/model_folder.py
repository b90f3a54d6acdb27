"""Which files in a folder are a model's weights, and which other files belong to the model.

Readers look for weights in different ways: transformers 5.17 prefers `model.safetensors` to an index; vLLM reads the files of
the index or, without one, every safetensors file, including those that a trainer left there. So this module alone chooses the
files for all code that reads or loads a model, and it refuses a folder that two readers would load as different models.

Of the other files, those that some reader of checkpoints opens belong to the model. Leftovers of a training run (optimizer
states, logs, earlier checkpoints) do not, and are not copied.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

PROCESSING = {
    "tokenizer": (
        *("tokenizer*", "*.tiktoken", "*.model", "tekken.json", "vocab*", "merges.txt"),
        *("added_tokens.json", "special_tokens_map.json"),
    ),
    "processor": ("*processor_config.json",),
    "chat template": ("*.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
}
"""Files that define how text and images become model inputs: kind -> patterns of names."""
_OTHERS = (
    *("generation_config.json", "README*", "LICEN[CS]E*", "NOTICE*", "COPYING*", "USE_POLICY*", "*.md"),
    "reducer/*",  # of our checkpoints
)
CONFIG_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Config files of formats besides config.json; a folder has only those of its own format."""
_BLOB = re.compile(r"/(models|datasets)--[^/]+/blobs/[^/]+$")  # a file in the Hub's cache, to which its folders link
_WRITTEN_ANEW = ("vlmcompress.json", "serve")  # written anew for each of our checkpoints


_Object = dict[str, Any] | None


class _Part(TypedDict, total=False):
    architectures: list[str] | None
    rope_parameters: _Object
    rope_scaling: _Object
    quantization_config: _Object


class Config(_Part, total=False):
    """The fields of config.json that are read before transformers or an engine reads all of it."""

    text_config: _Part | None
    vision_config: _Part | None


def weight_names(names: Collection[str], indexed: Collection[str] | None, where: str | Path) -> list[str]:
    """The names of a model's weight files, whether or not all exist; empty if there are none.

    Args:
        names: the files in the model's folder.
        indexed: the files in its index; None: it has no index.
        where: the folder, for messages.

    Raises:
        UserError: the folder holds two sets of weights, or several files without an index.
    """
    if indexed is not None:
        if SINGLE not in names or SINGLE in indexed:
            return sorted(indexed)
        if not any(name in names for name in indexed):
            raise UserError(f"{where}: {INDEX} names missing files, and {SINGLE} exists; remove {INDEX}")
        raise UserError(
            f"{where} holds two sets of weights: {SINGLE}, which transformers reads, and the {len(set(indexed))} files of "
            f"{INDEX}, which vLLM reads; move away the wrong one, {SINGLE} or {INDEX} with its files"
        )
    if SINGLE in names:
        return [SINGLE]
    single = sorted(name for name in names if name.endswith(".safetensors") and name != ADAPTER_WEIGHTS)
    if len(single) > 1:
        raise UserError(f"{where} has {len(single)} safetensors files but no {INDEX}; download {INDEX}, too")
    return single


def weight_files(folder: Path) -> list[Path]:
    """The weight files of the model in a folder, in order, as `weight_names` chooses them."""
    index, names = folder / INDEX, {path.name for path in folder.glob("*")}
    indexed = set(weight_map(index).values()) if index.is_file() else None
    return [folder / name for name in weight_names(names, indexed, folder)]


@contextlib.contextmanager
def servable_folder(folder: Path) -> Iterator[Path]:
    """Yield the folder, or a temporary folder of links without safetensors files that are not the model's weights: without an
    index, vLLM reads every safetensors file, also an adapter's."""
    others = {path.name for path in folder.glob("*.safetensors")} - {path.name for path in weight_files(folder)}
    if not others or (folder / INDEX).is_file():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="vlmcompress-model-") as view:
        for path in folder.resolve().iterdir():
            if path.name not in (*others, ADAPTER_CONFIG):
                (Path(view) / path.name).symlink_to(path)
        yield Path(view)


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, from an index. Raises `UserError` if it can't be read or is invalid."""
    try:
        content = json_files.read(index)
    except (OSError, ValueError) as error:
        raise UserError(f"index {index} is not readable JSON ({error}); download it again") from error
    places = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        raise UserError(f"{index} has no usable weight_map; download it again")
    if any(Path(place).name != place for place in places.values()):
        raise UserError(f"{index} points outside its folder; download it again")
    return places


def require_model(path: Path) -> None:
    """Raise `UserError` for the path of a model that is no folder, or one with neither config.json nor an adapter."""
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
    if not (path / "config.json").is_file() and not is_adapter(path):
        raise UserError(f"{path} has no config.json; give the folder of a Hugging Face checkpoint")


def require_written(path: Path) -> None:
    """Raise `UserError` for the path of a checkpoint of ours that is no folder, or one with neither config nor manifest."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give one written by `vlmcompress quantize`")
    if not any((path / name).is_file() for name in ("config.json", *_WRITTEN_ANEW)):
        raise UserError(f"{path} has no config.json; give a folder written by `vlmcompress quantize`")


def has_weights(folder: Path) -> bool:
    """Whether a folder has a model's weight files, complete or not; an adapter's do not count."""
    if not folder.is_dir():
        return False
    return (folder / INDEX).is_file() or any(path.name != ADAPTER_WEIGHTS for path in folder.glob("*.safetensors"))


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter and no model (a config.json alone is not a model)."""
    return (folder / ADAPTER_CONFIG).is_file() and not ((folder / "config.json").is_file() and has_weights(folder))


def adapter_files(folder: Path) -> list[Path]:
    """The files in an adapter's folder that change its base: the adapter's own, and those of tokenizer and processor."""
    return [folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)] + [
        folder / place for place in processing_files(folder)
    ]


def adapter_left(folder: Path) -> bool:
    """Whether an adapter's files are next to a model."""
    has_adapter = any((folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    return has_adapter and (folder / "config.json").is_file() and has_weights(folder)


def processing_files(folder: Path, kind: str | None = None) -> list[Path]:
    """The tokenizer and processor files in a folder, as sorted relative paths; `kind`: only of this key of `PROCESSING`.

    Raises as `require_file`.
    """
    patterns = PROCESSING[kind] if kind else tuple(itertools.chain(*PROCESSING.values()))
    return _chosen(folder, patterns)


def companions(folder: Path) -> list[Path]:
    """The files of the model in a folder besides config.json and weights, as sorted relative paths: tokenizer and processor,
    generation settings, card and licence, and Python code if a config refers to it (`auto_map`). Raises as `require_file`."""
    kept = [*processing_files(folder), *_chosen(folder, _OTHERS)]
    if any(_refers_to_code(folder / place) for place in (Path("config.json"), *kept)):
        kept += _chosen(folder, ("*.py",))
    return sorted(set(kept))


def require_file(folder: Path, place: Path) -> None:
    """Raise `UserError` unless a file of a model's folder is a regular one that lies in it, or in the Hub's cache."""
    file = folder / place
    if not file.is_file():
        raise UserError(f"{file} is a device, a pipe or a link that leads nowhere; remove it from the folder")
    target = file.resolve()
    if not (target.is_relative_to(folder.resolve()) or _BLOB.search(target.as_posix())):
        raise UserError(
            f"{file} is a link that leads out of the model's folder, to {target}; remove it, or put the file itself there"
        )


def unrelated_files(folder: Path) -> list[str]:
    """Sorted names of files and folders other than weights, config, adapter files and `companions`."""
    kept = {place.parts[0] for place in companions(folder)} | {path.name for path in weight_files(folder)}
    kept |= {"config.json", INDEX, ADAPTER_CONFIG, ADAPTER_WEIGHTS, *CONFIG_FILES, *_WRITTEN_ANEW}
    return sorted({place.parts[0] for place in _visible(folder) if (folder / place).is_file()} - kept)


def _visible(folder: Path) -> list[Path]:
    """What is in a folder and its subfolders, is no folder and not hidden, as sorted relative paths."""
    places = [path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()]
    return sorted(place for place in places if not any(part.startswith(".") for part in place.parts))


def _chosen(folder: Path, patterns: Collection[str]) -> list[Path]:
    """The files in a folder that match a pattern, as sorted relative paths. Raises as `require_file`."""
    places = [place for place in _visible(folder) if _matches(place, patterns)]
    for place in places:
        require_file(folder, place)
    return places


def _matches(place: Path, patterns: Collection[str]) -> bool:
    """Whether a file matches a pattern, ignoring case; patterns without `/` match only at the top level."""
    name = place.as_posix()
    return any(
        fnmatchcase(name.lower(), pattern.lower()) and name.count("/") == pattern.count("/") for pattern in patterns
    )


def _refers_to_code(file: Path) -> bool:
    if file.suffix != ".json" or not file.is_file():
        return False
    try:
        content = json_files.read(file)
    except (OSError, ValueError):
        return False  # the reader that needs the file reports it
    return isinstance(content, Mapping) and bool(content.get("auto_map"))
