"""Shell scripts that start a server: one flag per line, with a head that locates the checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_HEAD = """#!/bin/sh
# {title}
# Written by vlmcompress; edit it freely. HOST, PORT and MODEL may be set; further flags are passed on and take precedence.
set -eu
MODEL="${{MODEL:-$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)}}"
"""


def script(title: str, *lines: str) -> str:
    """A whole script: the head with `title`, then the lines."""
    return _HEAD.format(title=title) + "\n".join(lines) + "\n"


def execute(command: str, flags: Sequence[str], *raw: str) -> str:
    """An `exec` command with one flag per line.

    Args:
        command: its beginning, in shell syntax.
        flags: arguments, which are quoted here.
        raw: text after them that the shell expands, such as `--port "$PORT"`.
    """
    parts: list[str] = []
    for flag in flags:
        if flag.startswith("-") or not parts:
            parts.append(shlex.quote(flag))
        else:
            parts[-1] += f" {shlex.quote(flag)}"
    return " \\\n  ".join([f"exec {command}", *parts, *raw, '"$@"'])


def address(port: int) -> str:
    """Flags of host and port, which the shell expands: this machine only, unless HOST says otherwise."""
    return f'--host "${{HOST:-127.0.0.1}}" --port "${{PORT:-{port}}}"'
