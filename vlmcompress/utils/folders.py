"""Write a folder atomically, so that it is complete or absent, by one run at a time.

It is built in a hidden sibling (`.NAME.vlmcompress-xxxx/tree`, so that the final rename stays on one file system),
synced, and renamed. Next to `tree` is `lock`, which the writing process holds: a sibling whose `lock` is free was left by
a killed run, and the next run removes it. When OUT is replaced, the old folder is kept in `old` between the two renames; a
run killed at that moment leaves OUT absent, and the next run restores `old`.

A long run also holds `.NAME.lock` from its start; see `work_folder`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmcompress.utils import distributed, locks
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.text import size


class WriteError(UserError):
    """A file operation that failed while an output was written."""


def staging_path(out: Path, kind: str) -> Path:
    """Path of a hidden file or folder (`.NAME.KIND`) that a run keeps next to OUT until OUT is complete."""
    return out.with_name(f".{out.name}.{kind}")


def is_leftover(path: Path) -> bool:
    """Whether a killed run may have left this file of its writing in a folder of ours: `.NAME.lock` or `.NAME.part`."""
    return path.name.startswith(".") and path.suffix in (".lock", ".part")


@contextlib.contextmanager
def parents(out: Path) -> Iterator[None]:
    """Create OUT's parent folders for the context; new ones that stay empty are removed at its end."""
    parents = _make_parents(out.absolute().parent)
    try:
        yield
    finally:
        _remove_empty(parents)


def require_out(source: Path, out: Path, *, overwrite: bool, mark: str, look: bool = False) -> None:
    """Raise for an OUT that cannot or must not be written, and clean up after killed runs. Cheap; call it first.

    Args:
        mark: name of a JSON file that identifies our folders; only a folder that contains it is replaced, and if it lists
            `files`, only one without others.
        look: only check, and do not clean up after killed runs.

    Raises:
        UserError: OUT exists, is the source or lies inside it (or around it), is being written, or cannot be written.
    """
    require_apart(source, out, "source model")
    with user_errors(out):
        if not look and distributed.is_main():
            _recover(out)
        if os.path.lexists(out):
            if not overwrite:
                raise UserError(f"output {out} exists; choose another folder or pass --overwrite")
            if not out.is_dir():
                raise UserError(f"output {out} exists and is not a folder; choose another one")
            if any(out.iterdir()) and not (out / mark).is_file():
                raise UserError(f"output {out} has no {mark}, so it is not ours to overwrite; choose another folder")
            if others := _unlisted(out, mark):
                names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
                raise UserError(
                    f"output {out} has files that are not in {mark}: {names}; move them, or choose another folder"
                )
        # Looked at now, as it would else fail when the first file is written, after hours of work.
        parent = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"cannot write {out}: {parent} is not a folder you can write to; choose another output")


def _unlisted(folder: Path, mark: str) -> list[str]:
    """Files and links in a folder of ours that its `mark` does not list, without what killed runs left; empty if it lists
    none."""
    try:
        listed = json.loads((folder / mark).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    within = [path for path in sorted(folder.rglob("*")) if not path.is_dir() or path.is_symlink()]
    names = {path: path.relative_to(folder).as_posix() for path in within if not is_leftover(path)}
    return [name for name in names.values() if name != mark and name not in listed]


def require_apart(source: Path, out: Path, what: str) -> None:
    """Raise `UserError` for an OUT that is `source`, lies inside it or contains it; `what` names `source` in the message."""
    inner, outer = out.resolve(), source.resolve()
    if inner == outer or inner.is_relative_to(outer):
        raise UserError(f"output {out} is inside the {what} {source}; choose a folder outside it")
    if outer.is_relative_to(inner):
        raise UserError(f"output {out} contains the {what} {source}; choose another folder")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` at the end of the context; it is removed on any error.

    Call `require_out` first. An existing `out` is replaced once the new folder is complete and on disk.
    """
    with user_errors(out):
        parents = _make_parents(out.absolute().parent)
        try:
            # Next to OUT, so that the last step is a rename within one file system, which is all or nothing.
            stage = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.absolute().parent))
            with locks.held(stage / "lock", f"writing {out}"):
                try:
                    tree = stage / "tree"
                    tree.mkdir()
                    yield tree
                    _sync_tree(tree)
                    # Two renames replace a folder. A run that is killed between them is put right by the next `_recover`.
                    if os.path.lexists(out):
                        os.rename(out, stage / "old")
                        sync_folder(stage)
                    os.rename(tree, out)
                    sync_folder(out.absolute().parent)
                finally:
                    _put_back(stage, out)
                    shutil.rmtree(stage, ignore_errors=True)
        except BaseException:
            _remove_empty(parents)
            raise
        sync_folder(out.absolute().parent)


@contextlib.contextmanager
def removed_on_error(path: Path) -> Iterator[None]:
    """Remove the file `path` if the context ends with an error."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def dump(data: object) -> str:
    """Data as the text of a JSON file for human readers: indented, non-ASCII unescaped, with a final line break."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def save_files(folder: str | Path, texts: Mapping[str, tuple[str, str | bytes]]) -> dict[str, Path]:
    """Write files, given as kind -> (name, content), and return kind -> path. Old files are replaced once all are written."""
    paths = {kind: Path(folder, name) for kind, (name, _) in texts.items()}
    parts = {path: path.with_name(f".{path.name}.part") for path in paths.values()}
    try:
        for kind, path in paths.items():
            with user_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                text = texts[kind][1]
                parts[path].write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
                sync_file(parts[path])
        for path, part in parts.items():
            with user_errors(path):
                part.replace(path)
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):
                part.unlink()
    return paths


def save_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. Raises `OSError` if it can't be written, of which safetensors' own error has only the text."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, dict(metadata))
    except SafetensorError as error:
        # "... (os error 28)" is all that safetensors tells of a full disk.
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


@contextlib.contextmanager
def user_errors(out: Path) -> Iterator[None]:
    """Convert an `OSError` within the context into a `WriteError` about `out`."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise WriteError(f"no space left while writing {out}; free some or choose another output") from error
        reason = f"{error.strerror or error}{where}"
        raise WriteError(f"cannot write {out}: {reason}; check the path and its permissions") from error


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield a new folder in TMPDIR, which is removed at the end of the context, or when this process is killed within it."""
    with tempfile.TemporaryDirectory(prefix=f"vlmcompress-{purpose}-", ignore_cleanup_errors=True) as folder:
        # Handlers of signals are the caller's, and none hears SIGKILL: another process waits for the end of this one.
        command = ["sh", "-c", 'read -r _; rm -rf -- "$0"', folder]
        null = subprocess.DEVNULL
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
        ) as watcher:
            try:
                yield Path(folder)
            finally:
                watcher.kill()


def torch_cache() -> dict[str, str]:
    """The environment variable by which torch keeps what it compiles in the user's cache, and not in TMPDIR; empty if it is set
    or the cache is read-only."""
    cache = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "vllm", "torchinductor")
    parent = next(folder for folder in (cache, *cache.parents) if os.path.lexists(folder))
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ or not parent.is_dir() or not os.access(parent, os.W_OK):
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache)}


def require_space(out: Path, needed: int) -> None:
    """Raise `UserError` if OUT's file system has fewer than `needed` bytes free."""
    folder = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"no space for {out}: it needs about {size(needed)}, {folder} has {size(free)} free; free some or choose another "
            "output"
        )


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Hard-link `source` as `target`; copy it where the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def bytes_within(folder: Path) -> int:
    """Bytes of all files in a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries (names) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Sync a file's content to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _prefix(out: Path) -> str:
    return f".{out.name}.vlmcompress-"


def _make_parents(folder: Path) -> list[Path]:
    """Create `folder` and its parents; return the folders that were missing, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(parents: list[Path]) -> None:
    """Remove nested folders, given outermost first, from the innermost on as long as they are empty."""
    for folder in reversed(parents):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _sync_tree(tree: Path) -> None:
    for folder, _, names in os.walk(tree):
        for name in names:
            sync_file(Path(folder, name))
        sync_folder(Path(folder))
    sync_folder(tree.parent)


def _put_back(stage: Path, out: Path) -> None:
    """Restore OUT's old folder if a replacement stopped between its two renames."""
    if os.path.lexists(stage / "old") and not os.path.lexists(out):
        os.rename(stage / "old", out)


def _recover(out: Path) -> None:
    """Remove the files that killed runs left next to `out`, and restore an `out` that one of them had moved aside."""
    parent = out.absolute().parent
    if not parent.is_dir():
        return
    # A stage whose lock can be taken belongs to no living run.
    for stage in sorted(path for path in parent.iterdir() if path.name.startswith(_prefix(out))):
        if not (stage / "lock").is_file():
            with contextlib.suppress(OSError):  # a run that was killed before it took its lock, or one that is about to
                if time.time() - stage.stat().st_mtime > 60:
                    stage.rmdir()
            continue
        with locks.held(stage / "lock", f"writing {out}"):
            _put_back(stage, out)
            shutil.rmtree(stage)
