"""Does vLLM find the place of every tensor of a checkpoint, and does every parameter of its model get one?

Asked of vLLM itself (`names_worker`), before any weight is loaded. `models.unfound` says the same from tables, without vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmcompress.engines.vllm import environment, runner
from vlmcompress.errors import UserError

SILENCE = 1800.0  # seconds in which vLLM must be imported, or a model built
ENGINE = replace(
    runner.ENGINE,
    name="vllm-names",
    module=Path(__file__).with_name("names_worker.py"),
    environment=lambda: environment(VLLM_LOGGING_LEVEL="ERROR"),
)


class Unplaced(UserError):
    """vLLM does not load the checkpoint, because of its tensors' names."""


def places(folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """What vLLM makes of each folder, as `names_worker` says it, by the names given here; in one process."""
    lines = [{"id": name, "folder": str(Path(folder).resolve())} for name, folder in folders.items()]
    found = {}
    with contextlib.closing(ENGINE.events({}, lines, next(iter(folders.values())), SILENCE, SILENCE)) as events:
        for event in events:
            if event["event"] == "answer":
                found[event["id"]] = event
    return found


def check(folder: Path) -> str:
    """What is to say of a checkpoint whose tensors vLLM takes.

    Raises:
        Unplaced: it does not take them all, or lacks some.
        UserError: vLLM can't be asked.
    """
    found = places({"": folder})[""]
    if "error" in found:
        raise Unplaced(f"vLLM can't build the model of {folder}: {found['error']}")
    if lost := found["lost"]:
        first = min(lost)
        what = f"vLLM has no place for {len(lost)} tensors, first '{first}' ({lost[first]})"
        raise Unplaced(f"{what}; let `vlmcompress quantize` write the original again, it puts names right")
    if missing := found["missing"]:
        what = f"vLLM's {found['class']} gets nothing for {len(missing)} parameters, first '{missing[0]}'"
        raise Unplaced(f"{what}; let `vlmcompress quantize` write the original again")
    return f"vLLM's {found['class']} takes all {len(found['places'])} tensors by their names, and misses none"
