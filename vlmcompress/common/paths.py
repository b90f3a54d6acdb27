"""Recognize errors about paths that no file can have: too long, a loop of links, or with a NUL character."""

from __future__ import annotations

import errno

_WHY = {
    errno.ENAMETOOLONG: "the path is too long",
    errno.ELOOP: "its links lead in a circle",
}


def unusable(error: BaseException) -> str | None:
    """A line for the user about a path that no file can have, from the error of a file operation; None for other errors.

    These errors come from wherever a path is first touched, in pathlib as in a library, and mean the same everywhere.
    """
    if isinstance(error, OSError) and error.errno in _WHY:
        return f"cannot use {_shown(error.filename)}: {_WHY[error.errno]}; give another one"
    if isinstance(error, RuntimeError) and str(error).startswith(
        "Symlink loop from "
    ):  # pathlib's own, until Python 3.13
        return f"cannot use {_shown(str(error).split(' from ', 1)[1])}: {_WHY[errno.ELOOP]}; give another path"
    if isinstance(error, ValueError) and str(error).startswith("embedded null "):
        return "cannot use a path with a NUL character in it; give another one"
    return None


def _shown(name: object) -> str:
    text = str(name).strip("'")
    return f"'{text}'" if len(text) <= 200 else f"'{text[:80]}...' of {len(text):,} characters"
