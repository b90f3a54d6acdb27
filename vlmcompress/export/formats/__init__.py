"""Checkpoint formats. One file per format: pure maps from quantized weights to stored tensors and back, and its config block.

A recipe's `format` names the file. A format that is written extends `Writer`, one that is read `Reader`, most both, one whose
files only its engine reads `EngineFiles`; the classes' docstrings are the contract. A file ends with an instance:

    FORMAT      what the recipe's name stands for

Nothing here reads a model, and only `EngineFiles.write_files` writes a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.export.formats._base import EngineFiles, ExportFormat, Parts, Reader, Writer
from vlmcompress.utils.errors import UserError

if TYPE_CHECKING:
    from vlmcompress.models.layer_names import Layers

__all__ = ["EngineFiles", "ExportFormat", "Parts", "Reader", "Writer", "files_problems", "format_problems"]


def files_problems(
    exporter: ExportFormat,
    folder: Path,
    family: str,
    config: Mapping[str, Any],
    reducer: Mapping | None,
    mmproj: str | None,
) -> list[str]:
    """Reasons why a format of one engine cannot hold a model; for other formats only that of a wrong `mmproj`.

    Args:
        folder: the source's folder.
        config: transformers' configuration with all defaults.
        reducer: the checkpoint's reducer as in recipes, or None; mmproj: the recipe's.
    """
    if mmproj and exporter.METHOD != "gguf":
        return [f"mmproj is the type of GGUF's tower, and the format is {exporter.METHOD}; leave it out"]
    if not isinstance(exporter, Writer):
        return []
    reasons = exporter.source_problems(folder, family, config)
    if reducer and not reasons and (reason := exporter.reducer_problem(family, reducer)):
        reasons.append(reason)
    return reasons


def format_problems(exporter: ExportFormat, layers: Layers) -> list[str]:
    """Reasons why a format cannot hold these layers: it is read-only, lacks a scheme, or cannot combine them."""
    if not isinstance(exporter, Writer):
        return [f"files of quant_method {exporter.METHOD} can only be read; write compressed-tensors or modelopt"]
    reasons = []
    for scheme in layers.schemes:
        try:
            exporter.storage(scheme)
        except UserError as error:
            reasons.append(str(error))
    if layers.vocabulary and not exporter.VOCABULARY:
        reasons.append(
            f"{exporter.METHOD} files cannot hold a quantized {' and '.join(layers.vocabulary)}; leave head and embeddings in "
            "bf16, or write compressed-tensors"
        )
    return reasons + exporter.problems(layers)
