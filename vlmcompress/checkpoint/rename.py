"""Give a checkpoint that was written under another folder's name the name of the folder that it stands in."""

from __future__ import annotations

from pathlib import Path

from vlmcompress.checkpoint import card, launch_files
from vlmcompress.checkpoint.manifest import MANIFEST, hash_file, read
from vlmcompress.checkpoint.pieces import write_json


def rename(folder: Path, name: str) -> None:
    """Write launch files, card and manifest of the checkpoint in `folder` anew, for a folder called `name`.

    Files are replaced and not changed in place, so that others to which they are linked stay as they are.

    Raises:
        UserError: the folder has no manifest that can be read.
    """
    record = read(folder)
    record["recipe"] = record["recipe"] | {"out": name}
    files = {path: described for path, described in record["files"].items() if not _names_folder(path)}
    launch_paths = launch_files.write(folder, record, name)
    text = card.render(record, folder, name)
    for path in (folder / card.CARD, folder / MANIFEST):
        path.unlink(missing_ok=True)
    (folder / card.CARD).write_text(text, encoding="utf-8")
    renewed = {path.relative_to(folder).as_posix(): hash_file(path) for path in (*launch_paths, folder / card.CARD)}
    write_json(folder / MANIFEST, record | {"files": dict(sorted((files | renewed).items()))})


def _names_folder(path: str) -> bool:
    """Whether a file of a checkpoint, by its path in it, says the name of the folder."""
    return path == card.CARD or path.startswith(f"{launch_files.FOLDER}/")
