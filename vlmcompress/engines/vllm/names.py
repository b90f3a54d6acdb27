"""Check with vLLM where every tensor of a checkpoint is loaded, before any weight is.

`models.unfound` predicts the same from tables, without vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmcompress.engines.vllm import ENGINE as VLLM
from vlmcompress.engines.vllm import environment
from vlmcompress.engines.vllm.names_worker import NO_BIAS
from vlmcompress.utils.messages import Check

TIMEOUT = 1800.0  # seconds for importing vLLM, and for building a model
ENGINE = replace(
    VLLM,
    name="vllm-names",
    module=Path(__file__).with_name("names_worker.py"),
    environment=lambda: environment(VLLM_LOGGING_LEVEL="ERROR"),
)


def tensor_places(folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Name of each folder -> the answer of `names_worker` for it; all in one process."""
    lines = [{"id": name, "folder": str(Path(folder).resolve())} for name, folder in folders.items()]
    first = next(iter(folders.values()))
    with contextlib.closing(ENGINE.events({}, lines, first, TIMEOUT, TIMEOUT)) as events:
        return {event["id"]: event for event in events if event["event"] == "answer"}


def examine_tensors(folder: Path) -> Check:
    """Check that vLLM uses all tensors of a checkpoint and misses none. Raises UserError if vLLM cannot be run."""
    placed = tensor_places({"": folder})[""]
    if "error" in placed:
        return Check("names", False, f"vLLM can't build the model of {folder}: {placed['error']}")
    if lost := placed["lost"]:
        first = min(lost)
        what = f"vLLM has no place for {len(lost)} tensors, first '{first}' ({lost[first]})"
        remedy = "let `vlmcompress quantize` write the original again, it puts names right"
        if lost[first] == NO_BIAS:
            remedy = "give config.json what the family's published ones have, such as attention_bias in text_config"
        return Check("names", False, f"{what}; {remedy}")
    if missing := placed["missing"]:
        what = f"vLLM's {placed['class']} gets nothing for {len(missing)} parameters, first '{missing[0]}'"
        return Check("names", False, f"{what}; let `vlmcompress quantize` write the original again")
    text = f"vLLM's {placed['class']} takes all {len(placed['places'])} tensors by their names, and misses none"
    return Check("names", True, text)
