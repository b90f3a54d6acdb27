"""Fetch the files that are needed from a repository on the Hugging Face Hub into its cache, by huggingface_hub.

huggingface_hub lists a repository, downloads, resumes and caches; here are what it leaves open: which files are needed, what to
do where the Hub does not answer, and what to tell the user. Its `parse_safetensors_file_metadata` is not used for headers: it
gives names and shapes, and not the header's bytes, by which a checkpoint is identified (`identity.source_identity`).
"""

from __future__ import annotations

import atexit
import glob
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import note
from vlmcompress.utils.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, PICKLES, weight_names
from vlmcompress.utils.progress import ProgressBar
from vlmcompress.utils.text import size

Kind = Literal["model", "dataset"]
Weights = Literal["values", "headers", "none"]
TRAIN, TEST = ("train",), ("test", "validation", "val", "dev")
TABLES = (".parquet", ".jsonl", ".ndjson", ".json")
IMAGES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif")

_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "README.md", "LICENSE*", "NOTICE*")
_NO_TABLES = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_HEAD = 1 << 16  # bytes of a weight file that are requested first; the header of most fits
_LARGEST_HEADER = 100_000_000  # bytes, the same limit as in safetensors
_TIMEOUT = 30.0  # seconds for an answer about a repository


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
    def what(self) -> str:
        """Name and kind of the repository, for messages."""
        return f"{'data set' if self.kind == 'dataset' else 'model'} {self.id}"

    @property
    def where(self) -> dict[str, Any]:
        """The repository as arguments of huggingface_hub's functions."""
        return {"repo_id": self.id, "repo_type": self.kind, "revision": self.revision}


@dataclass(frozen=True)
class Chosen:
    """The files of a repository that are needed.

    Attributes:
        files: those to fetch.
        headers: safetensors files whose headers are enough.
        path: the file or folder to open once they are there, within the repository.
    """

    files: list[str]
    headers: Sequence[str] = ()
    path: str = "."


Choose = Callable[[Collection[str], Callable[[str], str]], Chosen]
"""A choice among the names of a repository's files; the second argument gives the text of a file."""


def model_files(
    repository: Repository, weights: Weights, code: bool, names: Collection[str], read: Callable[[str], str]
) -> Chosen:
    """The files of a model: configuration, tokenizer, processor, weights, model card, licence and, with `code`, Python."""
    patterns = (*_MODEL_FILES, "*.py") if code else _MODEL_FILES
    top = [name for name in names if "/" not in name or fnmatch(name, "additional_chat_templates/*.jinja")]
    files = [name for name in top if _matches(name, patterns) and (name == INDEX or not name.endswith(".index.json"))]
    shards = [] if weights == "none" else _shards(repository, names, read)
    if ADAPTER_CONFIG in names and not ("config.json" in names and (shards or weights == "none")):
        if ADAPTER_WEIGHTS not in names:
            raise UserError(f"{repository.what} has no {ADAPTER_WEIGHTS}; ask its authors for safetensors")
        return Chosen(sorted({*files, ADAPTER_WEIGHTS}))
    if "config.json" not in names:
        raise UserError(f"{repository.what} has no config.json; give one that transformers loads")
    if weights == "none":
        return Chosen(sorted(files))
    if not shards and any(_matches(name, PICKLES) for name in names):
        raise UserError(
            f"{repository.what} has only pickled weights (.bin/.pt), which can run code when read and are not "
            "fetched; convert them with transformers' save_pretrained (it writes safetensors)"
        )
    if not shards:
        raise UserError(f"{repository.what} has no *.safetensors file; give one that transformers loads")
    return Chosen(sorted({*files, *shards})) if weights == "values" else Chosen(sorted(files), shards)


def _shards(repository: Repository, names: Collection[str], read: Callable[[str], str]) -> list[str]:
    """The files of a repository's weights."""
    indexed = None
    if INDEX in names:
        try:
            indexed = set(json.loads(read(INDEX))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{repository.what}: {INDEX} has no usable weight_map; ask its authors") from error
    return weight_names([name for name in names if "/" not in name], indexed, repository.what)


def data_files(repository: Repository, splits: Sequence[str], names: Collection[str], _read: object) -> Chosen:
    """The files of a data set that `models.data.sources` reads: a saved data set, one table with its images, or the images."""
    part = repository.part
    within = sorted(name for name in names if _inside(name, part))
    if part and not within:
        raise UserError(f"{repository.what} has no '{part}'; it has {_some(names)}")
    saved = [name for name in within if PurePosixPath(name).name == "dataset_info.json"]
    if saved and any(name.endswith(".arrow") for name in within):
        folder = str(PurePosixPath(saved[0]).parent) if len(saved) == 1 else part or "."
        return Chosen([name for name in within if name.endswith((".arrow", ".json"))], path=folder)
    for suffix in TABLES:
        if tables := [n for n in within if _suffix(n) == suffix and PurePosixPath(n).name not in _NO_TABLES]:
            table = _one_table(repository, splits, tables)
            folder = "" if "/" not in table else f"{PurePosixPath(table).parent}/"
            images = [n for n in sorted(names) if _suffix(n) in IMAGES and n.startswith(folder)]
            return Chosen([table, *([] if suffix == ".parquet" else images)], path=table)
    images = [name for name in within if _suffix(name) in IMAGES]
    if not images:
        raise UserError(f"{repository.what} has no .parquet or .jsonl file and no images; name another")
    return Chosen(images, path=part or ".")


def _one_table(repository: Repository, splits: Sequence[str], names: Sequence[str]) -> str:
    """The one table to read: that of the first split which there is; of a table in several files the first, to train with."""
    tables: dict[str, list[str]] = {}  # name without the number of a file -> its files
    for name in names:
        tables.setdefault(re.sub(r"-\d{5}-of-\d{5}", "", name), []).append(name)
    of_split = ([files for name, files in tables.items() if PurePosixPath(name).name.startswith(s)] for s in splits)
    files = next((matching[0] for matching in of_split if len(matching) == 1), None)
    here = f"{repository.id}{f'@{repository.revision}' if repository.revision else ''}"
    if files is None and len(tables) > 1:
        firsts = [files[0] for files in tables.values()]
        several = f"{repository.what} has several tables ({_some(firsts)})"
        raise UserError(f"{several}; name one, like {here}:{firsts[0]}")
    files = files or next(iter(tables.values()))
    if len(files) > 1 and tuple(splits) != TRAIN:
        one_table = f"{repository.what}: {_some(files)} are one table in {len(files)} files"
        raise UserError(f"{one_table}; name one, like {here}:{files[0]}")
    if len(files) > 1:
        note(f"{repository.what} has {len(files)} files like {files[0]}; this first one is used")
    return files[0]


def split_files(repository: Repository, split: str, names: Collection[str], _read: object) -> Chosen:
    """All tables of one split of a data set, as `accuracy.local_data` reads them, and the images beside them."""
    part = repository.part
    within = [name for name in sorted(names) if _inside(name, part)]
    for pattern in (f"{split}*.parquet", "*.parquet", f"{split}*.jsonl", "*.jsonl"):
        if tables := [name for name in within if fnmatch(PurePosixPath(name).name, pattern)]:
            images = [] if pattern.endswith(".parquet") else [name for name in within if _suffix(name) in IMAGES]
            return Chosen(sorted({*tables, *images}), path=part or "")
    where = f" in {part}" if part else ""
    raise UserError(f"{repository.what} has no .parquet or .jsonl file{where}; name another")


def _inside(name: str, part: str | None) -> bool:
    """Whether a file is the named part of a repository, or in it."""
    return part is None or name == part.rstrip("/") or name.startswith(part.rstrip("/") + "/")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _some(names: Collection[str]) -> str:
    """The first few of many names."""
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def http_library() -> Any:
    """The library by which huggingface_hub sends requests, and whose errors it passes on: httpx, from 2.0 on httpx2."""
    try:
        from huggingface_hub.utils import httpx
    except ImportError:  # before 1.33 it does not say
        import httpx
    return httpx


def fetch(repository: Repository, choose: Choose) -> Path:
    """Fetch the chosen files, as far as the cache lacks them, and return the path to open. UserError: they cannot be had."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    def read(name: str) -> str:
        path = hf_hub_download(filename=name, tqdm_class=_bar(lambda done: None), **repository.where)
        return Path(path).read_text(encoding="utf-8")

    try:
        try:
            listing: Any = HfApi().repo_info(**repository.where, files_metadata=True, timeout=_TIMEOUT)
        except (OSError, http_library().HTTPError, HfHubHTTPError) as error:
            return _from_cache(repository, choose, error)
        sizes = {file.rfilename: file.size or 0 for file in listing.siblings or ()}
        chosen = choose(sizes, read)
        folder = _download(repository, str(listing.sha), {name: sizes.get(name, 0) for name in chosen.files})
        if _missing(repository, folder.name, chosen.headers):
            folder = _with_headers(repository, folder, chosen)
        return folder / chosen.path
    except (OSError, http_library().HTTPError, HfHubHTTPError, ValueError) as error:
        raise UserError(_explained(repository, error)) from error


def _download(repository: Repository, commit: str, sizes: dict[str, int]) -> Path:
    """Fetch files, given with their bytes, that the cache lacks, behind a note and a bar; returns the folder of the commit."""
    from huggingface_hub import snapshot_download

    missing = _missing(repository, commit, sizes)
    total = sum(sizes[name] for name in missing)
    if missing:
        files = f"{len(missing)} file{'s' if len(missing) > 1 else ''}"
        note(f"fetching {repository.what} at {commit[:12]}: {files}, {size(total)}")
    progress = ProgressBar()
    try:
        bar = _bar(lambda done: progress("fetching", min(done, total), total))
        return Path(snapshot_download(**repository.where, allow_patterns=[*map(glob.escape, sizes)], tqdm_class=bar))
    finally:
        progress.close()


def _missing(repository: Repository, commit: str, names: Collection[str]) -> list[str]:
    """Those of a commit's files that the cache lacks."""
    from huggingface_hub import try_to_load_from_cache

    where = repository.where | {"revision": commit}
    return [name for name in names if not isinstance(try_to_load_from_cache(filename=name, **where), str)]


def _from_cache(repository: Repository, choose: Choose, reason: Exception) -> Path:
    """The path to open in the cache, if all that is needed is there; else `reason` is raised again."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(**repository.where, allow_patterns=[], local_files_only=True))
    except LocalEntryNotFoundError:
        raise reason from None
    cached = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    listed = _listed(repository)
    try:
        chosen = choose(listed or cached, lambda name: (folder / name).read_text(encoding="utf-8"))
    except OSError:
        raise reason from None
    except UserError:
        if listed:
            raise
        raise reason from None
    if not {*chosen.files, *chosen.headers} <= cached:  # the cache never holds headers alone
        raise reason
    return folder / chosen.path


def _listed(repository: Repository) -> list[str]:
    """Names of all files of the repository, as an earlier download noted them in the cache; empty where none did."""
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:  # an older huggingface_hub keeps no such notes
        return []
    try:
        return [file.path for file in get_cached_repo_tree(**repository.where)]
    except CachedRepoTreeNotFoundError:
        return []


def _with_headers(repository: Repository, folder: Path, chosen: Chosen) -> Path:
    """A temporary folder with links to the fetched files, and weight files of true headers and lengths without values."""
    base = Path(tempfile.mkdtemp(prefix="vlmcompress-headers-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    copy = (
        base / folder.parent.parent.name / folder.parent.name / folder.name
    )  # `hub.identity` reads id and commit off it
    for name in chosen.files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).symlink_to((folder / name).resolve())
    for name in chosen.headers:
        head, length = _header(repository, name, folder.name)
        with (copy / name).open("wb") as file:
            file.write(head)
            file.truncate(length)  # sparse: nothing is stored behind the header
    return copy


def _header(repository: Repository, name: str, commit: str) -> tuple[bytes, int]:
    """The header of a safetensors file, with the 8 bytes before it, and the length of the whole file."""
    end = _HEAD
    while True:
        head, length = _first_bytes(repository, name, commit, end)
        end = 8 + int.from_bytes(head[:8], "little")
        if end > _LARGEST_HEADER or end > length:
            raise UserError(f"{repository.what}: {name} is not a safetensors file; ask its authors")
        if end <= len(head):
            return head[:end], length


def _first_bytes(repository: Repository, name: str, commit: str, count: int) -> tuple[bytes, int]:
    """The first bytes of a file on the Hub, and the length of the whole file."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = hf_hub_url(repository.id, name, revision=commit)
    headers = build_hf_headers() | {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        length = answer.headers.get("Content-Range", "").rpartition("/")[2] or answer.headers["Content-Length"]
        head = bytearray()
        for chunk in answer.iter_bytes():
            head += chunk
            if len(head) >= count:  # a server that knows no ranges sends all of it
                break
    return bytes(head[:count]), int(length)


def _explained(repository: Repository, error: Exception) -> str:
    """The message for a failed download: in one line what went wrong and what to do."""
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
            f"{what} is no path here, and {host} does not have it or keeps it private; check the name, or log in "
            f"(hf auth login) and {by_hand}"
        )
    nowhere = f"{what} is no path here and not whole in the cache"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{nowhere}, and HF_HUB_OFFLINE is set; {by_hand}"
    if isinstance(error, http_library().TransportError | errors.LocalEntryNotFoundError):
        return f"{nowhere}, and {host} cannot be reached; {by_hand}"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return f"{what} could not be fetched ({first}); run it again (files that arrived are kept), or {by_hand}"


def _bar(report: Callable[[int], None]) -> type:
    """A class that huggingface_hub takes for a progress bar. It has several for the same bytes; the largest count holds."""
    from tqdm import tqdm

    lock, most = threading.Lock(), [0]

    class Bar(tqdm):
        def __init__(self, *args: Any, **settings: Any):
            settings.pop("name", None)
            self.counts_bytes = settings.get("unit") == "B"
            super().__init__(*args, **settings | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            if self.counts_bytes:
                with lock:
                    self.n += n or 0
                    most[0] = max(most[0], int(self.n))
                    report(most[0])

    return Bar
