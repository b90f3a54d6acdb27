"""Text of launch files: shell scripts with a flag a line and a head that finds the checkpoint, and YAML without aliases."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import yaml

HEAD = """#!/bin/sh
# {title}
# Written by vlmcompress; change it as you like. HOST, PORT and MODEL may be set; further flags are passed on and win.
set -eu
MODEL="${{MODEL:-$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)}}"
"""


def script(title: str, *lines: str) -> str:
    """A whole script: the head with `title`, then the lines."""
    return HEAD.format(title=title) + "\n".join(lines) + "\n"


def execute(command: str, flags: Sequence[str], *raw: str) -> str:
    """An `exec` line broken up at the flags.

    Args:
        command: its beginning, as the shell reads it.
        flags: arguments, quoted here.
        raw: text behind them that the shell expands, such as `--port "$PORT"`.
    """
    parts: list[str] = []
    for flag in flags:
        if flag.startswith("-") or not parts:
            parts.append(shlex.quote(flag))
        else:
            parts[-1] += f" {shlex.quote(flag)}"
    return " \\\n  ".join([f"exec {command}", *parts, *raw, '"$@"'])


class _Plain(yaml.SafeDumper):
    """Writes a value that is used twice twice, as not every reader of a manifest knows aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def documents(*values: Any) -> str:
    """YAML documents, keys in their order."""
    return yaml.dump_all(values, Dumper=_Plain, sort_keys=False)
