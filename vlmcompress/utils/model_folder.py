"""What a model's folder holds: which files are its weights, and which others belong to it.

Readers look for weights in different ways: transformers 5.17 takes `model.safetensors` before an index, vLLM the files of the
index and, without one, every safetensors file; both read what a trainer left there. So the files are chosen here, once, for
all that read or load a model, and a folder of which two readers would make two models is refused.

Of the other files those belong to a model that some reader of checkpoints asks for. What a training run leaves next to them
(states of optimizers, logs, earlier checkpoints) is no part of it and is not carried on.
"""

from __future__ import annotations

import contextlib
import itertools
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
"""Files that make model inputs of text and images: what they describe -> patterns of their names."""
_OTHERS = (
    *("generation_config.json", "README*", "LICEN[CS]E*", "NOTICE*", "COPYING*", "USE_POLICY*", "*.md"),
    *("vision_attention_scales.json", "reducer/*"),  # what a checkpoint of ours carries
)
CONFIG_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Where formats keep their config besides config.json; a folder has those of its own format only."""
_WRITTEN_ANEW = ("vlmcompress.json", "serve")  # made anew for each checkpoint of ours


_Object = dict[str, Any] | None


class _Part(TypedDict, total=False):
    architectures: list[str] | None
    rope_parameters: _Object
    rope_scaling: _Object
    quantization_config: _Object


class Config(_Part, total=False):
    """A config.json: the parts that are looked into before transformers, or an engine, reads all of it."""

    text_config: _Part | None
    vision_config: _Part | None


def weight_names(names: Collection[str], indexed: Collection[str] | None, where: str | Path) -> list[str]:
    """The names of the files that hold a model's weights, whether or not all are there; empty where there are none.

    Args:
        names: the files in the model's folder.
        indexed: the files that its index names; None: it has no index.
        where: the folder, for messages.

    Raises:
        UserError: the folder holds two sets of weights, or several files without an index.
    """
    if indexed is not None:
        if SINGLE not in names or SINGLE in indexed:
            return sorted(indexed)
        if not any(name in names for name in indexed):
            raise UserError(f"{where}: {INDEX} names files that are not there, and {SINGLE} is; remove {INDEX}")
        raise UserError(
            f"{where} holds two sets of weights: {SINGLE}, which transformers reads, and the {len(set(indexed))} files of "
            f"{INDEX}, which vLLM reads; move away the one that is not meant, {SINGLE} or {INDEX} with its files"
        )
    if SINGLE in names:
        return [SINGLE]
    single = sorted(name for name in names if name.endswith(".safetensors") and name != ADAPTER_WEIGHTS)
    if len(single) > 1:
        raise UserError(f"{where} has {len(single)} safetensors files but no {INDEX}; download {INDEX}, too")
    return single


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights of the model in a folder, in order, as `weight_names` chooses them."""
    index, names = folder / INDEX, {path.name for path in folder.glob("*")}
    indexed = set(weight_map(index).values()) if index.is_file() else None
    return [folder / name for name in weight_names(names, indexed, folder)]


@contextlib.contextmanager
def servable_folder(folder: Path) -> Iterator[Path]:
    """The folder, or within the context one of links to its files but for those that vLLM would take for weights of the model:
    without an index it reads every safetensors file, also an adapter's."""
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
    """Name of a tensor -> name of the file that holds it, of an index. Raises `UserError` for one that can't be read."""
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


def check_model(path: Path) -> None:
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


def check_written(path: Path) -> None:
    """Raise `UserError` for the path of a checkpoint of ours that is no folder."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give one written by `vlmcompress quantize`")


def has_weights(folder: Path) -> bool:
    """Whether a folder has files of a model's weights, whole or not; those of an adapter do not count."""
    if not folder.is_dir():
        return False
    return (folder / INDEX).is_file() or any(path.name != ADAPTER_WEIGHTS for path in folder.glob("*.safetensors"))


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter and no model; a config.json alone is none."""
    return (folder / ADAPTER_CONFIG).is_file() and not ((folder / "config.json").is_file() and has_weights(folder))


def adapter_files(folder: Path) -> list[Path]:
    """The files of an adapter's folder that decide what becomes of its base: its own, and those that make model inputs."""
    return [folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)] + [
        folder / place for place in processing_files(folder)
    ]


def adapter_left(folder: Path) -> bool:
    """Whether the files of an adapter lie next to a model."""
    has_adapter = any((folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    return has_adapter and (folder / "config.json").is_file() and has_weights(folder)


def processing_files(folder: Path, kind: str | None = None) -> list[Path]:
    """The files in a folder that make model inputs, relative to it, in order; `kind`: of this key of `PROCESSING` alone."""
    patterns = PROCESSING[kind] if kind else tuple(itertools.chain(*PROCESSING.values()))
    return [place for place in _visible(folder) if _matches(place, patterns)]


def companions(folder: Path) -> list[Path]:
    """The files that belong to the model in a folder besides config.json and weights, relative to it, in order: what makes its
    inputs, generation settings, card and licence, and Python code where a config refers to it (`auto_map`)."""
    kept = [*processing_files(folder), *(place for place in _visible(folder) if _matches(place, _OTHERS))]
    code = [place for place in _visible(folder) if _matches(place, ("*.py",))]
    if code and any(_refers_to_code(folder / place) for place in (Path("config.json"), *kept)):
        kept += code
    return sorted(set(kept))


def belongs(place: Path) -> bool:
    """Whether a file of this name, relative to a model's folder, may be one of its `companions`, its config or its weights."""
    kinds = (*itertools.chain(*PROCESSING.values()), *_OTHERS, "*.py", "config.json", INDEX, "*.safetensors")
    return _matches(place, kinds)


def unrelated_files(folder: Path) -> list[str]:
    """Names of files and folders that are no weights, no config, no adapter's and not among the `companions`, in order."""
    kept = {place.parts[0] for place in companions(folder)} | {path.name for path in weight_files(folder)}
    kept |= {"config.json", INDEX, ADAPTER_CONFIG, ADAPTER_WEIGHTS, *CONFIG_FILES, *_WRITTEN_ANEW}
    return sorted({place.parts[0] for place in _visible(folder)} - kept)


def _visible(folder: Path) -> list[Path]:
    """The files in a folder and its subfolders, relative to it, in order; those that are hidden do not count."""
    places = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(place for place in places if not any(part.startswith(".") for part in place.parts))


def _matches(place: Path, patterns: Collection[str]) -> bool:
    """Whether a file is of a kind, whatever the case of its name; patterns without `/` are of files at the top."""
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
        return False  # whoever needs it says so
    return isinstance(content, Mapping) and bool(content.get("auto_map"))
