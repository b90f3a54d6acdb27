"""Families of models as OpenVINO GenAI has them, one file each: the modules of transformers that become its graphs.

A file is called like the family in `vlmcompress.models`, and its `FAMILY` is a `OpenvinoFamily`. Names and shapes of
inputs and outputs are those that openvino.genai 2026.4 reads (`src/cpp/src/visual_language/*/classes.cpp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmcompress.export.openvino.spec import OpenvinoFamily, Packed, ParameterSource
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import OPENVINO as REGISTRY

__all__ = ["REGISTRY", "OpenvinoFamily", "Packed", "Source", "pruning", "token_ids", "write_openvino"]

METHOD = "cdpruner"


def write_openvino(tree: Path, family: str, source: ParameterSource) -> None:
    """Write the graphs and the tokenizer of a checkpoint into its folder `tree`, which has its config and tokenizer."""
    from vlmcompress.export.openvino.convert import (
        write_graphs,  # imports openvino, which need not be there to name a family
    )

    write_graphs(tree, REGISTRY.get(family).FAMILY, source)


def token_ids(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """OpenVINO's tokens of each text, by the tokenizer that was written into a folder, or that would be."""
    from vlmcompress.export.openvino import convert as _convert

    return _convert.graph_token_ids(folder, texts)


def pruning(reduce: Mapping[str, Any], family: str | None = None) -> dict[str, Any]:
    """What `VLMPipeline.generate` is told of a reducer: `pruning_ratio`, the percentage that goes, and `relevance_weight`.

    Args:
        reduce: the reducer, as recipes have it.
        family: name of the model's family, to be checked, too.

    Raises:
        UserError: the pipeline has no such reducer, or prunes no such family.
    """
    if reduce.keys() - {"method", "keep"} or reduce["method"] != METHOD:
        raise UserError(
            f"OpenVINO GenAI has no reducer of visual tokens but {METHOD} with keep alone; take that, or --resize"
        )
    if family and not REGISTRY.get(family).FAMILY.prunes:
        raise UserError(
            f"OpenVINO GenAI drops no visual tokens of the family {family}; make images smaller by --resize"
        )
    percent = 100 * (1 - reduce["keep"])
    if abs(percent - round(percent)) > 1e-6 or not 1 <= round(percent) <= 99:
        raise UserError(
            f"OpenVINO GenAI drops whole percents of the tokens, from 1 to 99; keep {reduce['keep']} is none"
        )
    return {"pruning_ratio": round(percent), "relevance_weight": 0.0}
