"""Model families of OpenVINO GenAI, one file each: the transformers modules that become its graphs.

A file is named like the family in `vlmcompress.models`, and its `FAMILY` is an `OpenvinoFamily`. Names and shapes of
inputs and outputs are those that openvino.genai 2026.4 reads (`src/cpp/src/visual_language/*/classes.cpp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlmcompress.export.openvino.spec import OpenvinoFamily, Packed, ParameterSource
from vlmcompress.utils.registry import OPENVINO as REGISTRY

__all__ = ["REGISTRY", "OpenvinoFamily", "Packed", "Source", "token_ids", "write_openvino"]


def write_openvino(tree: Path, family: str, source: ParameterSource) -> None:
    """Write the graphs and the tokenizer of a checkpoint to its folder `tree`, which already has config and tokenizer files."""
    from vlmcompress.export.openvino.convert import (
        write_graphs,  # imports openvino, which listing families does not need
    )

    write_graphs(tree, REGISTRY.get(family), source)


def token_ids(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """OpenVINO's tokens of each text, from the tokenizer in a folder or as it would be written."""
    from vlmcompress.export.openvino import convert as _convert

    return _convert.graph_token_ids(folder, texts)
