"""Qwen2-VL."""

from __future__ import annotations

from typing import Any

from vlmcompress.export.openvino.families._qwen import IMAGE, Blocks, inputs, patches, problems
from vlmcompress.export.openvino.spec import Graph, OpenvinoFamily


def tower(model: Any) -> dict[str, Graph]:
    """Patches, then blocks with the merger."""
    return {
        "vision_embeddings_model": patches(model),
        "vision_embeddings_merger_model": Graph(Blocks(model.model.visual), inputs(model)),
    }


FAMILY = OpenvinoFamily(tower, IMAGE, axes=3, problems=problems)
