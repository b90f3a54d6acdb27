"""Hugging Face Hub ids in place of folders: `org/name[@revision]`, and for data also `org/name[@revision]:PATH`.

`local` maps an id to a folder of huggingface_hub's cache and downloads missing files: of a model its safetensors files,
configuration, tokenizer and processor; of a data set one table or its images. Pickles are never fetched, Python code only on
request. An existing path always takes precedence over an id. huggingface_hub lists, downloads, resumes and caches; this module
selects the files and words the errors.

Only an explicit id may cause network access. `offline_except_ids` therefore sets all libraries to offline mode, which
`local` lifts while it works, unless the user has set HF_HUB_OFFLINE: then only the cache is used.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from vlmcompress.utils.errors import UserError
from vlmcompress.utils.images import SUFFIXES
from vlmcompress.utils.messages import note
from vlmcompress.utils.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, PICKLES, weight_names
from vlmcompress.utils.text import size

Kind = Literal["model", "dataset"]
Weights = Literal["values", "headers", "none"]
OFFLINE = "HF_HUB_OFFLINE"
TRAIN, TEST = ("train",), ("test", "validation", "val", "dev")
TABLES = (".parquet", ".jsonl", ".ndjson", ".json")

_NAME = r"[A-Za-z0-9][\w.-]*"
_ID = re.compile(rf"(?P<id>{_NAME}/{_NAME})(@(?P<revision>[\w./-]+))?(:(?P<part>[^:\0]+))?", re.ASCII)
_CACHED = re.compile(
    r"(models|datasets)--(?P<id>[\w.-]+?--[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})(/(?P<rest>.+))?$"
)
_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "README.md", "LICENSE*", "NOTICE*")
SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a data set that `datasets` saved: one of them is in its folder."""
_NO_TABLES = ("dataset_infos.json", *SAVED, "state.json")
_LARGEST_HEADER = 100_000_000  # bytes, the same limit as in safetensors
_TIMEOUT = 30.0  # seconds for a request about a repository
_offline_by_default = False  # whether OFFLINE is set by `offline_except_ids` and not by the user


@dataclass(frozen=True)
class Repository:
    """A repository on the Hub, or a part of one, parsed from an id.

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
    def what(self) -> str:
        """Name and kind of the repository, for messages."""
        return f"{'data set' if self.kind == 'dataset' else 'model'} {self.id}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The repository as arguments of huggingface_hub's functions."""
        return {"repo_id": self.id, "repo_type": self.kind, "revision": self.revision}


class Chosen(NamedTuple):
    """The files of a repository to fetch, safetensors files of which only the header is needed, and what to open afterwards."""

    files: Sequence[str]
    headers: Sequence[str] = ()
    path: str = "."


def offline_except_ids() -> None:
    """Set all libraries to offline mode, in this process and its children; ids passed to `local` still work."""
    global _offline_by_default
    if OFFLINE not in os.environ and "TRANSFORMERS_OFFLINE" not in os.environ:
        os.environ[OFFLINE] = "1"
        _offline_by_default = True


def parse_repository(name: str | Path, kind: Kind = "model") -> Repository | None:
    """The repository of an id; None for an existing path or a name that cannot be an id."""
    text = os.fspath(name)
    match = _ID.fullmatch(text)
    if match is None or os.path.lexists(text) or (kind == "model" and match["part"]):
        return None
    if kind == "dataset" and not match["part"] and PurePosixPath(match["id"]).suffix.lower() in (*TABLES, *SUFFIXES):
        return None
    return Repository(match["id"], kind, match["revision"], match["part"])


def require_data(name: str | Path, *, answered: bool = False) -> None:
    """Raise `UserError` for a path that can't be data, known at a glance; ids of the Hub pass.

    Args:
        answered: they must have answers, which a folder of images has not.
    """
    if parse_repository(name, "dataset") is not None:
        return
    path, remedy = Path(name), "a folder of images, a .jsonl or .parquet file, or a data set"
    if answered:
        remedy = "a .jsonl or .parquet file with answers, or a data set"
        if path.is_dir() and not any((path / file).is_file() for file in SAVED):
            raise UserError(f"{path} is a folder of images, which have no answers; give {remedy}")
    if not path.exists():
        raise UserError(f"{path} does not exist; give {remedy}")
    if not path.is_dir() and not path.is_file():
        raise UserError(f"{path} is a pipe or a device, and data are read more than once; write them to a file")


def local(
    name: str | Path,
    kind: Kind = "model",
    *,
    weights: Weights = "values",
    code: bool = False,
    splits: Sequence[str] = TRAIN,
    whole: str | None = None,
) -> Path:
    """The local path of a model or data set; files of an id that are missing in the cache are downloaded first.

    Args:
        name: a path, or `org/name[@revision]`; for data also `org/name[@revision]:PATH`.
        weights: "values": with weight files; "none": without them; "headers": possibly with placeholder files that have the
            true headers but no values, in a folder that is removed when this process ends.
        code: also fetch a model's Python files.
        splits: names of splits, the preferred one first; of several tables, the first whose name begins with one is read.
        whole: name of a split; the result is then the folder with all its tables, as `accuracy.local_data` reads it.

    Raises:
        UserError: there is no such repository, access is not granted, or it is neither cached nor reachable.
    """
    repository = parse_repository(name, kind)
    if repository is None:
        return Path(name)

    def choose(names: Collection[str], read: Callable[[str], str]) -> Chosen:
        if kind == "model":
            return _model_files(repository, weights, code, names, read)
        return _data_files(repository, splits, whole, names)

    with online():
        try:
            return _fetch(repository, choose)
        except (OSError, http_library().HTTPError, ValueError) as error:
            raise UserError(_explained(repository, error)) from error


def identity(path: str | Path) -> dict[str, str] | None:
    """`{"source": "org/name[:PATH]", "revision": commit}` of a path in the Hub's cache; None for other paths."""
    match = _CACHED.search(os.path.abspath(path))
    if match is None:
        return None
    source = match["id"].replace("--", "/", 1)
    return {"source": f"{source}:{match['rest']}" if match["rest"] else source, "revision": match["commit"]}


def display_path(path: str | Path) -> str:
    """A path as users write it: `org/name@commit` for one in the Hub's cache."""
    cached = identity(path)
    if cached is None:
        return str(path)
    source, _, rest = cached["source"].partition(":")
    return f"{source}@{cached['revision']}" + (f":{rest}" if rest else "")


def source_facts(path: str | Path) -> dict[str, str]:
    """Facts about a source for the manifest: its id and commit, or only the last part of its path."""
    return identity(path) or {"source": Path(path).resolve().name}


def offline() -> bool:
    """Whether the user has set HF_HUB_OFFLINE (or transformers' TRANSFORMERS_OFFLINE)."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE and not _offline_by_default


@contextlib.contextmanager
def online() -> Iterator[None]:
    """Lift the offline mode that `offline_except_ids` set."""
    from huggingface_hub import constants

    kept = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = kept and not _offline_by_default
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = kept


def http_library() -> Any:
    """The HTTP library of huggingface_hub, whose errors it raises: httpx, or httpx2 from 2.0 on."""
    from huggingface_hub.utils import httpx

    return httpx


def _model_files(
    repository: Repository, weights: Weights, code: bool, names: Collection[str], read: Callable[[str], str]
) -> Chosen:
    """The files of a model: configuration, tokenizer, processor, weights, model card, licence and, with `code`, Python."""
    patterns = (*_MODEL_FILES, "*.py") if code else _MODEL_FILES
    files = [
        name
        for name in names
        if fnmatch(name, "additional_chat_templates/*.jinja") or ("/" not in name and _matches(name, patterns))
        if name == INDEX or not name.endswith(".index.json")
    ]
    shards: list[str] = []
    if weights != "none":
        try:
            indexed = set(json.loads(read(INDEX))["weight_map"].values()) if INDEX in names else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{repository.what}: {INDEX} has no usable weight_map; ask its authors") from error
        shards = weight_names([name for name in names if "/" not in name], indexed, repository.what)
    if ADAPTER_CONFIG in names and not ("config.json" in names and (shards or weights == "none")):
        if ADAPTER_WEIGHTS not in names:
            raise UserError(f"{repository.what} has no {ADAPTER_WEIGHTS}; ask its authors for safetensors")
        return Chosen([*files, ADAPTER_WEIGHTS])
    if "config.json" not in names:
        raise UserError(f"{repository.what} has no config.json; give one that transformers loads")
    if weights != "none" and not shards:
        if any(_matches(name, PICKLES) for name in names):
            raise UserError(
                f"{repository.what} has only pickled weights (.bin/.pt), which can run code when read and are not "
                "fetched; convert them with transformers' save_pretrained (it writes safetensors)"
            )
        raise UserError(f"{repository.what} has no *.safetensors file; give one that transformers loads")
    return Chosen(files, shards) if weights == "headers" else Chosen([*files, *shards])


def _data_files(repository: Repository, splits: Sequence[str], whole: str | None, names: Collection[str]) -> Chosen:
    """The files of a data set for `models.data.sources`: a saved data set, one table with its images, or images alone; or,
    of the split `whole`, all tables for `accuracy.local_data`."""
    part = (repository.part or "").rstrip("/")
    within = sorted(name for name in names if not part or f"{name}/".startswith(f"{part}/"))
    if not within and part:
        raise UserError(f"{repository.what} has no '{part}'; it has {_some(names)}")
    saved = [name for name in within if PurePosixPath(name).name == "dataset_info.json"]
    if saved and not whole and any(name.endswith(".arrow") for name in within):
        folder = str(PurePosixPath(saved[0]).parent) if len(saved) == 1 else part or "."
        return Chosen([name for name in within if name.endswith((".arrow", ".json"))], path=folder)
    for suffix in TABLES:
        tables = [n for n in within if _suffix(n) == suffix and PurePosixPath(n).name not in _NO_TABLES]
        if tables and whole:
            tables = [name for name in tables if PurePosixPath(name).name.startswith(whole)] or tables
        elif tables:
            tables = [_one_table(repository, splits, tables)]
        if tables:
            folder = "" if whole or "/" not in tables[0] else f"{PurePosixPath(tables[0]).parent}/"
            inside = within if whole else names
            images = [n for n in inside if suffix != ".parquet" and _suffix(n) in SUFFIXES and n.startswith(folder)]
            return Chosen([*tables, *images], path=part or "." if whole else tables[0])
    images = [name for name in within if _suffix(name) in SUFFIXES]
    if not images or whole:
        raise UserError(f"{repository.what} has no .parquet or .jsonl file and no images; name another")
    return Chosen(images, path=part or ".")


def _one_table(repository: Repository, splits: Sequence[str], names: Sequence[str]) -> str:
    """The file of the table to read: of the first existing split; for training, the first file of a table in several files."""
    tables: dict[str, list[str]] = {}  # name without the number of a file -> its files
    for name in names:
        tables.setdefault(re.sub(r"-\d{5}-of-\d{5}", "", name), []).append(name)
    of_split = ([files for name, files in tables.items() if PurePosixPath(name).name.startswith(s)] for s in splits)
    files = next((matching[0] for matching in of_split if len(matching) == 1), None)
    if files is None and len(tables) == 1:
        files = next(iter(tables.values()))
    if files is None or (len(files) > 1 and tuple(splits) != TRAIN):
        several = files or [files[0] for files in tables.values()]
        kind = f"one table in {len(several)} files" if files else "several tables"
        here = f"{repository.id}{f'@{repository.revision}' if repository.revision else ''}:{several[0]}"
        raise UserError(f"{repository.what} has {kind} ({_some(several)}); name one, like {here}")
    if len(files) > 1:
        note(f"{repository.what} has {len(files)} files like {files[0]}; only this first one is used")
    return files[0]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _some(names: Collection[str]) -> str:
    """The first four names, and the number of the others, as text."""
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _fetch(repository: Repository, choose: Callable[[Collection[str], Callable[[str], str]], Chosen]) -> Path:
    """Fetch the files that `choose` selects and the cache does not have, and return the path to open.

    Args:
        choose: selects files from the names in the repository; its second argument reads the text of a file.
    """
    from huggingface_hub import HfApi, get_cached_repo_tree, hf_hub_download, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    unreachable: Exception | None = None
    files_alone = False  # whether only the cached files of the repository are known
    try:
        info: Any = HfApi().repo_info(**repository.arguments, files_metadata=True, timeout=_TIMEOUT)
        commit, sizes = str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()}
    except (OSError, http_library().HTTPError) as error:
        unreachable = error
        try:
            folder = Path(snapshot_download(**repository.arguments, allow_patterns=[], local_files_only=True))
        except LocalEntryNotFoundError:
            raise unreachable from None
        commit = folder.name
        try:
            sizes = {file.path: file.size for file in get_cached_repo_tree(**repository.arguments)}
        except CachedRepoTreeNotFoundError:  # the cache was filled file by file, without a list of all files
            files_alone = True
            sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    here = repository.arguments | {"revision": commit}
    try:
        chosen = choose(sizes, lambda name: Path(hf_hub_download(filename=name, **here)).read_text(encoding="utf-8"))
    except UserError:
        if unreachable and files_alone:
            raise unreachable from None
        raise

    def absent(names: Sequence[str]) -> list[str]:
        return [name for name in names if not isinstance(try_to_load_from_cache(filename=name, **here), str)]

    missing, headers = absent(chosen.files), absent(chosen.headers)
    if unreachable:
        if missing or headers:
            raise unreachable
        return folder / chosen.path
    if missing:
        total = size(sum(sizes[name] for name in missing))
        note(f"fetching {repository.what} at {commit[:12]}: {total}")
    # by branch, not by commit, so that the cache can resolve the branch when offline
    patterns = [glob.escape(name) for name in chosen.files]
    folder = Path(snapshot_download(**repository.arguments, allow_patterns=patterns))
    return _with_headers(repository, folder, chosen) if headers else folder / chosen.path


def _with_headers(repository: Repository, folder: Path, chosen: Chosen) -> Path:
    """A temporary folder with links to the fetched files and sparse weight files that have true headers and lengths only.

    `HfApi.parse_safetensors_file_metadata` returns names and shapes, but not the header's bytes, which identify a checkpoint
    (`identity.source_identity`).
    """
    from huggingface_hub import HfFileSystem

    base = Path(tempfile.mkdtemp(prefix="vlmcompress-headers-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    # `identity` parses id and commit from it
    copy = base / folder.parent.parent.name / folder.parent.name / folder.name
    for name in chosen.files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).symlink_to((folder / name).resolve())
    remote = HfFileSystem(skip_instance_cache=True)
    for name in chosen.headers:
        with (
            remote.open(f"{repository.id}@{folder.name}/{name}", block_size=1 << 16) as source,
            (copy / name).open("wb") as file,
        ):
            length = source.read(8)
            end = 8 + int.from_bytes(length, "little")
            if end > min(_LARGEST_HEADER, source.size):
                raise UserError(f"{repository.what}: {name} is not a safetensors file; ask its authors")
            file.write(length + source.read(end - 8))
            file.truncate(source.size)  # sparse: nothing is stored after the header
    return copy / chosen.path


def _explained(repository: Repository, error: Exception) -> str:
    """The one-line message for a failed download: the cause and the remedy."""
    from huggingface_hub import constants, errors

    what, host, dataset = repository.what, constants.ENDPOINT, repository.kind == "dataset"
    revision = f" --revision {repository.revision}" if repository.revision else ""
    by_hand = f"fetch it with: hf download {repository.id}{' --repo-type dataset' if dataset else ''}{revision}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        page = f"{host}/{'datasets/' if dataset else ''}{repository.id}"
        return f"{what} is gated; accept its terms at {page} and log in with: hf auth login"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{what} has no revision '{repository.revision}' at {host}; name one of its branches or tags"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return (
            f"{what} is not a local path, and {host} does not have it or keeps it private; check the name, or log in "
            f"(hf auth login) and {by_hand}"
        )
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError | http_library().TransportError):
        reason = f"{OFFLINE} is set" if constants.HF_HUB_OFFLINE else f"{host} cannot be reached"
        return f"{what} is not a local path and not completely cached, and {reason}; {by_hand}"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return f"{what} could not be fetched ({first}); run again (complete files are kept), or {by_hand}"
