"""Repositories of the Hugging Face Hub where a folder could stand: `org/name[@revision]`, and for data also `:PATH` in it.

`local` turns such a name into a folder of huggingface_hub's own cache, after fetching what is needed and not there: of a
model its safetensors files, configuration, tokenizer and processor; of a data set one table or its images. Pickles are
never fetched, Python code only on request. A path that exists is that path, whatever it looks like.

An id is an explicit wish to fetch it; nothing else may reach out. `only_ids` therefore tells all libraries that they are
offline, and `local` alone lifts that while it works, unless the user has set HF_HUB_OFFLINE: then the cache must do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from vlmcompress.utils._hub_fetch import (
    IMAGES,
    TABLES,
    TEST,
    TRAIN,
    Choose,
    Kind,
    Repository,
    Weights,
    data_files,
    fetch,
    http_library,
    model_files,
    split_files,
)

__all__ = [
    "IMAGES",
    "TEST",
    "TRAIN",
    "Repository",
    "facts",
    "http_library",
    "identity",
    "local",
    "offline",
    "only_ids",
    "parse",
    "shown",
]
__all__ += ["reaching_out"]

OFFLINE = "HF_HUB_OFFLINE"

_NAME = r"[A-Za-z0-9][\w.-]*"
_ID = re.compile(rf"(?P<id>{_NAME}/{_NAME})(@(?P<revision>[\w./-]+))?(:(?P<part>[^:\0]+))?", re.ASCII)
_CACHED = re.compile(
    r"(models|datasets)--(?P<id>[\w.-]+?--[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})(/(?P<rest>.+))?$"
)
_ours = False  # whether OFFLINE is set by `only_ids` and not by the user


def only_ids() -> None:
    """Let no library fetch anything by itself, in this process or its children; ids given to `local` still work."""
    global _ours
    if OFFLINE not in os.environ and "TRANSFORMERS_OFFLINE" not in os.environ:
        os.environ[OFFLINE] = "1"
        _ours = True


def parse(name: str | Path, kind: Kind = "model") -> Repository | None:
    """The repository that a name means; None for a path: one that exists, or that cannot be an id."""
    text = os.fspath(name)
    match = _ID.fullmatch(text)
    if match is None or os.path.lexists(text) or (kind == "model" and match["part"]):
        return None
    if kind == "dataset" and not match["part"] and PurePosixPath(match["id"]).suffix.lower() in (*TABLES, *IMAGES):
        return None
    return Repository(match["id"], kind, match["revision"], match["part"])


def local(
    name: str | Path,
    kind: Kind = "model",
    *,
    weights: Weights = "values",
    code: bool = False,
    splits: Sequence[str] = TRAIN,
    whole: str | None = None,
) -> Path:
    """The folder or file that a name stands for; what an id names is fetched first, as far as the cache lacks it.

    Args:
        name: a path, or `org/name[@revision]`; of data also `org/name[@revision]:PATH`.
        weights: "values": with weight files; "none": without them; "headers": files that hold true headers and no values
            may stand in for them, in a folder that this process removes when it ends.
        code: fetch a model's Python files, too.
        splits: names of splits; of data in several tables the one is taken whose name begins with the first split found.
        whole: name of a split; the result is then the folder with all its tables, as `accuracy.local_data` reads it.

    Raises:
        UserError: there is no such repository, access is not granted, or it is neither cached nor reachable.
    """
    repository = parse(name, kind)
    if repository is None:
        return Path(name)
    choose: Choose
    if kind == "model":
        choose = functools.partial(model_files, repository, weights, code)
    elif whole:
        choose = functools.partial(split_files, repository, whole)
    else:
        choose = functools.partial(data_files, repository, splits)
    with reaching_out():
        return fetch(repository, choose)


def identity(path: str | Path) -> dict[str, str] | None:
    """`{"source": "org/name", "revision": commit}` of a path in the Hub's cache, with what it is in there; else None."""
    match = _CACHED.search(os.path.abspath(path))
    if match is None:
        return None
    source = match["id"].replace("--", "/", 1)
    return {"source": f"{source}:{match['rest']}" if match["rest"] else source, "revision": match["commit"]}


def shown(path: str | Path) -> str:
    """A path as people and commands know it: `org/name@commit` for one in the Hub's cache."""
    cached = identity(path)
    if cached is None:
        return str(path)
    source, _, rest = cached["source"].partition(":")
    return f"{source}@{cached['revision']}" + (f":{rest}" if rest else "")


def facts(path: str | Path) -> dict[str, str]:
    """Facts about a source for the manifest: its id and commit, or the last part of its path; nothing of this machine."""
    return identity(path) or {"source": Path(path).resolve().name}


def offline() -> bool:
    """Whether the user has set HF_HUB_OFFLINE (or transformers' TRANSFORMERS_OFFLINE)."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE and not _ours


@contextlib.contextmanager
def reaching_out() -> Iterator[None]:
    """Lift the offline mode that `only_ids` set."""
    from huggingface_hub import constants

    kept = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = kept and not _ours
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = kept
