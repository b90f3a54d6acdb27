"""Choose from the names of the files in a repository on the Hugging Face Hub those that are needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from vlmcompress.common.messages import note
from vlmcompress.errors import UserError

Kind = Literal["model", "dataset"]
Weights = Literal["values", "headers", "none"]
TRAIN, TEST = ("train",), ("test", "validation", "val", "dev")
TABLES = (".parquet", ".jsonl", ".ndjson", ".json")
IMAGES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif")

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "README.md", "LICENSE*", "NOTICE*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NO_TABLES = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Repository:
    """A repository on the Hub, or a part of one, as an id names it.

    Attributes:
        id: `org/name`.
        revision: branch, tag or commit; None: the main branch.
        part: a file or folder in it.
    """

    id: str
    kind: Kind
    revision: str | None = None
    part: str | None = None

    @property
    def command(self) -> str:
        """The shell command that downloads the whole repository by hand."""
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        return f"hf download {self.id}{kind}" + (f" --revision {self.revision}" if self.revision else "")

    @property
    def what(self) -> str:
        """Name and kind of the repository, for messages."""
        return f"{'data set' if self.kind == 'dataset' else 'model'} {self.id}"


class Choice(Protocol):
    """A choice among the files of a repository."""

    def __call__(self, names: Collection[str], read: Callable[[str], str]) -> list[str]:
        """The files to fetch of those that the repository has, in alphabetical order; `read` gives the text of one."""

    def result(self, folder: Path) -> Path:
        """The path to open once the chosen files are in `folder`. Call it after the choice."""


class ModelFiles:
    """Choose the files of a model: configuration, tokenizer, processor, weights, model card and licence.

    Args:
        weights: leave out the weight files unless "values".
        code: take Python files, too.
    """

    def __init__(self, repository: Repository, weights: Weights, code: bool):
        self.repository, self.weights, self.code = repository, weights, code

    def __call__(self, names: Collection[str], read: Callable[[str], str]) -> list[str]:
        if "config.json" not in names:
            raise UserError(f"{self.repository.what} has no config.json; give one that transformers loads")
        kinds = (*_MODEL_FILES, "*.py") if self.code else _MODEL_FILES
        top = [name for name in names if "/" not in name or fnmatch(name, "additional_chat_templates/*.jinja")]
        others = [name for name in top if _any(name, kinds) and (name == _INDEX or not name.endswith(".index.json"))]
        return sorted({*others, *(self.shards(names, read) if self.weights == "values" else ())})

    def shards(self, names: Collection[str], read: Callable[[str], str]) -> list[str]:
        """The weight files that transformers reads: those of the index, or the only one."""
        if _INDEX in names:
            try:
                return sorted(set(json.loads(read(_INDEX))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{self.repository.what}: {_INDEX} has no usable weight_map; ask its authors"
                ) from error
        found = [name for name in sorted(names) if "/" not in name and name.endswith(".safetensors")]
        if not found and any(_any(name, _PICKLES) for name in names):
            raise UserError(
                f"{self.repository.what} has only pickled weights (.bin/.pt), which can run code when read and are not "
                "fetched; convert them with transformers' save_pretrained (it writes safetensors)"
            )
        if not found:
            raise UserError(f"{self.repository.what} has no *.safetensors file; give one that transformers loads")
        return [_SINGLE] if _SINGLE in found else found

    def result(self, folder: Path) -> Path:
        """The folder."""
        return folder


class DataFiles:
    """Choose from a data set what `data.sources` reads: a saved data set, one table (with its images), or the images.

    Args:
        splits: see `hub.local`.
    """

    def __init__(self, repository: Repository, splits: Sequence[str]):
        self.repository, self.splits, self.main = repository, splits, ""

    def __call__(self, names: Collection[str], read: Callable[[str], str]) -> list[str]:
        within = sorted(name for name in names if _inside(name, self.repository.part))
        images = [name for name in within if _suffix(name) in IMAGES]
        saved = [name for name in within if PurePosixPath(name).name == "dataset_info.json"]
        if self.repository.part and not within:
            raise UserError(f"{self.repository.what} has no '{self.repository.part}'; it has {_some(names)}")
        if saved and any(name.endswith(".arrow") for name in within):
            self.main = str(PurePosixPath(saved[0]).parent) if len(saved) == 1 else self.repository.part or "."
            return [name for name in within if name.endswith((".arrow", ".json"))]
        if table := self._table(within):
            self.main = table
            return [table] if table.endswith(".parquet") else [table, *self._beside(names, table)]
        if not images:
            raise UserError(f"{self.repository.what} has no .parquet or .jsonl file and no images; name another")
        self.main = self.repository.part or "."
        return images

    def _table(self, names: Sequence[str]) -> str | None:
        """The name of the one table to read; of a table in several files the first."""
        for suffix in (".parquet", ".jsonl", ".ndjson", ".json"):
            found = [n for n in names if _suffix(n) == suffix and PurePosixPath(n).name not in _NO_TABLES]
            groups: dict[str, list[str]] = {}
            for name in found:
                groups.setdefault(re.sub(r"-\d{5}-of-\d{5}", "", name), []).append(name)
            if groups:
                return self._first(self._group(groups))
        return None

    def _group(self, groups: dict[str, list[str]]) -> list[str]:
        for split in self.splits:
            fitting = [files for name, files in groups.items() if PurePosixPath(name).name.startswith(split)]
            if len(fitting) == 1:
                return fitting[0]
        if len(groups) > 1:
            example = next(iter(groups.values()))[0]
            files = _some([files[0] for files in groups.values()])
            raise UserError(
                f"{self.repository.what} has several tables ({files}); name one, like {self._name(example)}"
            )
        return next(iter(groups.values()))

    def _first(self, files: Sequence[str]) -> str:
        if len(files) == 1:
            return files[0]
        if self.splits != TRAIN:
            raise UserError(
                f"{self.repository.what}: {_some(files)} are one table in {len(files)} files; "
                f"name one, like {self._name(files[0])}"
            )
        note(f"{self.repository.what} has {len(files)} files like {files[0]}; this first one is used")
        return files[0]

    def _name(self, file: str) -> str:
        return f"{self.repository.id}{f'@{self.repository.revision}' if self.repository.revision else ''}:{file}"

    @staticmethod
    def _beside(names: Collection[str], table: str) -> list[str]:
        """The images that rows of a table may show: those in its folder and below."""
        folder = str(PurePosixPath(table).parent)
        return [n for n in sorted(names) if _suffix(n) in IMAGES and (folder == "." or n.startswith(folder + "/"))]

    def result(self, folder: Path) -> Path:
        """The table, or the folder of images."""
        return folder / self.main


class SplitFiles:
    """Choose from a data set all tables of one split, as `evaluation.local_data` reads them, and the images beside them."""

    def __init__(self, repository: Repository, split: str):
        self.repository, self.split = repository, split

    def __call__(self, names: Collection[str], read: Callable[[str], str]) -> list[str]:
        part = self.repository.part
        within = [name for name in sorted(names) if _inside(name, part)]
        for pattern in (f"{self.split}*.parquet", "*.parquet", f"{self.split}*.jsonl", "*.jsonl"):
            if found := [name for name in within if fnmatch(PurePosixPath(name).name, pattern)]:
                images = [name for name in within if _suffix(name) in IMAGES]
                return found if pattern.endswith(".parquet") else sorted({*found, *images})
        raise UserError(
            f"{self.repository.what} has no .parquet or .jsonl file{f' in {part}' if part else ''}; name another"
        )

    def result(self, folder: Path) -> Path:
        """The folder, or the file that was named."""
        return folder / (self.repository.part or "")


def _inside(name: str, part: str | None) -> bool:
    """Whether a file is the named part of a repository, or in it."""
    return part is None or name == part.rstrip("/") or name.startswith(part.rstrip("/") + "/")


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _some(names: Collection[str]) -> str:
    """The first few of many names."""
    first = sorted(names)[:4]
    return ", ".join(first) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
