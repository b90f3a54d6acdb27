"""Model families of OpenVINO GenAI, one file each: the transformers modules that become its graphs.

A file is named like the family in `vlmcompress.models`, and its `FAMILY` is an `OpenvinoFamily`. Names and shapes of
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
    """Write the graphs and the tokenizer of a checkpoint to its folder `tree`, which already has config and tokenizer files."""
    from vlmcompress.export.openvino.convert import (
        write_graphs,  # imports openvino, which listing families does not need
    )

    write_graphs(tree, REGISTRY.get(family), source)


def token_ids(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """OpenVINO's tokens of each text, from the tokenizer in a folder or as it would be written."""
    from vlmcompress.export.openvino import convert as _convert

    return _convert.graph_token_ids(folder, texts)


def pruning(reduce: Mapping[str, Any], family: str | None = None) -> dict[str, Any]:
    """The arguments of `VLMPipeline.generate` for a reducer: `pruning_ratio`, the dropped percentage, and `relevance_weight`.

    Args:
        reduce: the reducer as in recipes.
        family: name of the model's family, which is checked as well; None: not checked.

    Raises:
        UserError: the pipeline does not support this reducer, or pruning in this family.
    """
    if reduce.keys() - {"method", "keep"} or reduce["method"] != METHOD:
        raise UserError(
            f"OpenVINO GenAI supports only the reducer {METHOD} with no option but keep; use that, or resize:SHARE"
        )
    if family and not REGISTRY.get(family).prunes:
        raise UserError(
            f"OpenVINO GenAI drops no visual tokens of the family {family}; make images smaller with --reduce resize:SHARE"
        )
    percent = 100 * (1 - reduce["keep"])
    if abs(percent - round(percent)) > 1e-6 or not 1 <= round(percent) <= 99:
        raise UserError(
            f"OpenVINO GenAI drops whole percents of the tokens, from 1 to 99; keep {reduce['keep']} is not one; change it"
        )
    return {"pruning_ratio": round(percent), "relevance_weight": 0.0}
