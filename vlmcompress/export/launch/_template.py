"""The text of launch files: shell scripts with a flag a line and a head that finds the checkpoint, and YAML without aliases."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from vlmcompress.export.readers import LoadFacts

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
    """The script that starts an engine's server: the engine's own flags, then those that the checkpoint decides.

    Args:
        title: the engine's, with its version.
        command: what starts the server, as the shell reads it.
        flags: those of every checkpoint.
        raw: text after all flags that the shell expands.
        length, gpus, code: the engine's names of the flags for the context length, the GPUs that share the model, and the
            checkpoint's own Python code.
        cache: flags about the KV cache.
    """
    flags = [*flags, *([length, str(facts.max_len)] if facts.max_len else []), *cache]
    flags += [gpus, str(facts.gpus)] if facts.gpus > 1 else []
    flags += [code] if facts.code else []
    return script(f"{facts.name} in {title}", execute(command, flags, *raw))


class _Plain(yaml.SafeDumper):
    """Writes a value that is used twice twice, as not every reader of a manifest knows aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def documents(*values: Any) -> str:
    """YAML documents, keys in their order."""
    return yaml.dump_all(values, Dumper=_Plain, sort_keys=False)
