"""Launch files: how to start a checkpoint in each engine and form of deployment. One file per engine, its name is the entry's.

Everything here is a pure map from `Facts` (what config.json and the manifest say) to text; `checkpoint.launch_files` writes it
into the checkpoint's folder `serve/`. An entry is a module with

    TITLE: str                        the engine's name for people, with the version that the files are for
    CHECKED: str                      how the files were checked
    refusal(facts) -> str | None      why there are none: what it cannot load, as the end of a sentence about it
    files(facts) -> {path: text}      paths below `serve/`, relative to it
    command(facts) -> str             the line that uses them, from the checkpoint's folder

No flag is guessed: each entry says in its docstring where its flags were read. All files together are some 20 kB.
"""

from __future__ import annotations

from vlmcompress.common.registry import LAUNCHERS as REGISTRY
from vlmcompress.launch import _grafana, _readme
from vlmcompress.launch._facts import Facts, Group, Machine, Reducer, read

__all__ = ["REGISTRY", "Facts", "Group", "Machine", "Reducer", "commands", "files", "read"]


def files(facts: Facts) -> dict[str, str]:
    """All launch files of a checkpoint: path below `serve/` -> text. Always has `README.md`, which says what is there and why
    the rest is not; `grafana.json` where vLLM serves it."""
    found: dict[str, str] = {}
    for name in REGISTRY:
        launcher = REGISTRY.get(name)
        if launcher.refusal(facts) is None:
            found |= launcher.files(facts)
    if REGISTRY.get("vllm").refusal(facts) is None:
        found["grafana.json"] = _grafana.dashboard(facts)
    return found | {"README.md": _readme.text(facts)}


def commands(facts: Facts) -> list[tuple[str, str]]:
    """Title and command of each engine that loads the checkpoint, vLLM first."""
    names = sorted(REGISTRY, key=lambda name: (name != "vllm", name))
    found = [REGISTRY.get(name) for name in names]
    return [(one.TITLE, one.command(facts)) for one in found if one.refusal(facts) is None]
