"""The text of launch files: shell scripts with one flag per line and a head that locates the checkpoint, and YAML."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from vlmcompress.export.readers import LoadFacts

HEAD = """#!/bin/sh
# {title}
# Written by vlmcompress; edit it freely. HOST, PORT and MODEL may be set; further flags are passed on and take precedence.
set -eu
MODEL="${{MODEL:-$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)}}"
"""


def script(title: str, *lines: str) -> str:
    """A whole script: the head with `title`, then the lines."""
    return HEAD.format(title=title) + "\n".join(lines) + "\n"


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


def server_script(
    facts: LoadFacts,
    title: str,
    command: str,
    flags: Sequence[str],
    *raw: str,
    length: str,
    gpus: str,
    code: str = "--trust-remote-code",
    cache: Sequence[str] = (),
) -> str:
    """The script that starts an engine's server: the engine's fixed flags, then those that depend on the checkpoint.

    Args:
        title: the engine's title, with its version.
        command: command that starts the server, in shell syntax.
        flags: flags for every checkpoint.
        raw: text after all flags that the shell expands.
        length, gpus, code: the engine's flags for the context length, the number of GPUs, and running the checkpoint's
            Python code.
        cache: flags about the KV cache.
    """
    flags = [*flags, *([length, str(facts.max_len)] if facts.max_len else []), *cache]
    flags += [gpus, str(facts.gpus)] if facts.gpus > 1 else []
    flags += [code] if facts.code else []
    return script(f"{facts.name} in {title}", execute(command, flags, *raw))


class _Plain(yaml.SafeDumper):
    """Write no aliases for repeated values, as not every reader of manifests supports them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def documents(*values: Any) -> str:
    """YAML documents, keys in their order."""
    return yaml.dump_all(values, Dumper=_Plain, sort_keys=False)
