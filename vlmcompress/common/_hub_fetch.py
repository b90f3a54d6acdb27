"""Fetch the files that are needed from a repository on the Hugging Face Hub into its cache, by huggingface_hub."""

from __future__ import annotations

import atexit
import glob
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from vlmcompress.common._hub_files import Choice, ModelFiles, Repository
from vlmcompress.common.messages import note
from vlmcompress.common.progress import ProgressBar
from vlmcompress.common.text import size
from vlmcompress.errors import UserError

_HEAD = 1 << 16  # bytes of a weight file that are asked for first; the header of most fits
_LARGEST_HEADER = 100_000_000  # bytes, the same limit as in safetensors
_TIMEOUT = 30.0  # seconds for an answer about a repository


class Fetch:
    """Fetch one repository from the Hub, or take it from the cache where the Hub does not answer.

    Args:
        choose: picks the files that are needed from those that the repository has.
    """

    def __init__(self, repository: Repository, choose: Choice):
        self.repository, self.choose = repository, choose
        self.where: dict[str, Any]
        self.where = {"repo_id": repository.id, "repo_type": repository.kind, "revision": repository.revision}

    def run(self) -> Path:
        """Fetch the files and return the path to open, as `choose` names it. UserError: it cannot be had."""
        import httpx
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            try:
                about: Any = HfApi().repo_info(**self.where, files_metadata=True, timeout=_TIMEOUT)
            except (OSError, httpx.HTTPError, HfHubHTTPError) as error:
                return self.choose.result(self._cached(error))
            sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
            names = self.choose(sizes, self._text)
            folder = self._download(str(about.sha), {name: sizes.get(name, 0) for name in names})
            if isinstance(self.choose, ModelFiles) and self.choose.weights == "headers":
                return self._with_headers(folder, names, self.choose.shards(sizes, self._text))
            return self.choose.result(folder)
        except (OSError, httpx.HTTPError, HfHubHTTPError, ValueError) as error:
            raise UserError(self._explained(error)) from error

    def _text(self, name: str) -> str:
        from huggingface_hub import hf_hub_download

        silent = _bar(lambda done: None)
        return Path(hf_hub_download(filename=name, tqdm_class=silent, **self.where)).read_text(encoding="utf-8")

    def _download(self, commit: str, sizes: dict[str, int]) -> Path:
        from huggingface_hub import snapshot_download

        missing = self._missing(commit, sizes)
        total = sum(sizes[name] for name in missing)
        if missing:
            files = f"{len(missing)} file{'s' if len(missing) > 1 else ''}"
            note(f"fetching {self.repository.what} at {commit[:12]}: {files}, {size(total)}")
        progress = ProgressBar()
        try:
            patterns = [glob.escape(name) for name in sizes]
            bar = _bar(lambda done: progress("fetching", min(done, total), total))
            return Path(snapshot_download(**self.where, allow_patterns=patterns, tqdm_class=bar))
        finally:
            progress.close()

    def _missing(self, commit: str, names: Collection[str]) -> list[str]:
        from huggingface_hub import try_to_load_from_cache

        where = self.where | {"revision": commit}
        return [name for name in names if not isinstance(try_to_load_from_cache(filename=name, **where), str)]

    def _cached(self, reason: Exception) -> Path:
        """The repository's folder in the cache, if all that is needed is there; else `reason` is raised again."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(**self.where, allow_patterns=[], local_files_only=True))
        except LocalEntryNotFoundError:
            raise reason from None
        there = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        listed = self._listed()
        if isinstance(self.choose, ModelFiles) and self.choose.weights == "headers":
            self.choose.weights = "values"  # headers alone are not in the cache
        try:
            wanted = self.choose(listed or there, lambda name: (folder / name).read_text(encoding="utf-8"))
        except OSError:
            raise reason from None
        except UserError:
            if listed:
                raise
            raise reason from None
        if not set(wanted) <= set(there):
            raise reason
        return folder

    def _listed(self) -> list[str]:
        """Names of all files of the repository, as an earlier download noted them in the cache; empty where none did."""
        try:
            from huggingface_hub import get_cached_repo_tree
            from huggingface_hub.errors import CachedRepoTreeNotFoundError
        except ImportError:  # an older huggingface_hub keeps no such notes
            return []
        try:
            return [file.path for file in get_cached_repo_tree(**self.where)]
        except CachedRepoTreeNotFoundError:
            return []

    def _with_headers(self, folder: Path, names: Sequence[str], shards: Sequence[str]) -> Path:
        """The folder in the cache if it has all shards; else another one, with stand-ins of true headers and no values."""
        commit = folder.name
        if not self._missing(commit, shards):
            return folder
        base = Path(tempfile.mkdtemp(prefix="vlmcompress-headers-"))
        atexit.register(shutil.rmtree, base, ignore_errors=True)
        made = base / folder.parent.parent.name / folder.parent.name / folder.name  # `identity` knows it by these
        for name in names:
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).symlink_to((folder / name).resolve())
        for name in shards:
            head, length = self._header(name, commit)
            with (made / name).open("wb") as file:  # of full length, but nothing is stored behind the header
                file.write(head)
                file.truncate(length)
        return made

    def _header(self, name: str, commit: str) -> tuple[bytes, int]:
        """The header of a safetensors file, with the 8 bytes before it, and the length of the whole file."""
        head, length = self._first_bytes(name, commit, _HEAD)
        end = 8 + int.from_bytes(head[:8], "little")
        if end > _LARGEST_HEADER or end > length:
            raise UserError(f"{self.repository.what}: {name} is not a safetensors file; ask its authors")
        if end > len(head):
            head, length = self._first_bytes(name, commit, end)
        return head[:end], length

    def _first_bytes(self, name: str, commit: str, count: int) -> tuple[bytes, int]:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = hf_hub_url(self.repository.id, name, revision=commit)
        headers = build_hf_headers() | {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
            hf_raise_for_status(answer)
            length = answer.headers.get("Content-Range", "").rpartition("/")[2] or answer.headers["Content-Length"]
            found = bytearray()
            for chunk in answer.iter_bytes():
                found += chunk
                if len(found) >= count:  # a server that knows no ranges sends all of it
                    break
        return bytes(found[:count]), int(length)

    def _explained(self, error: Exception) -> str:
        """The message for a failed download: in one line what went wrong and what to do."""
        import httpx
        from huggingface_hub import constants
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        what, host, by_hand = self.repository.what, constants.ENDPOINT, f"fetch it with: {self.repository.command}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, GatedRepoError):
            page = f"{host}/{'datasets/' if self.repository.kind == 'dataset' else ''}{self.repository.id}"
            return f"{what} is gated; accept its terms at {page} and log in with: hf auth login"
        if isinstance(error, RevisionNotFoundError):
            return f"{what} has no revision '{self.repository.revision}' at {host}; name one of its branches or tags"
        if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
            return (
                f"{what} is no path here, and {host} does not have it or keeps it private; check the name, or log in "
                f"(hf auth login) and {by_hand}"
            )
        if isinstance(error, OfflineModeIsEnabled):
            return f"{what} is no path here and not whole in the cache, and HF_HUB_OFFLINE is set; {by_hand}"
        if isinstance(error, httpx.TransportError | LocalEntryNotFoundError):
            return f"{what} is no path here and not whole in the cache, and {host} cannot be reached; {by_hand}"
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
