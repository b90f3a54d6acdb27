"""Attach the reducer that a checkpoint's config.json carries to the model that was loaded from it.

    model = AutoModelForImageTextToText.from_pretrained("OUT", dtype="auto")
    processor = AutoProcessor.from_pretrained("OUT")
    attach_carried(model, processor, "OUT")

transformers itself does not know the block and keeps all visual tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmcompress.checkpoint import reducer_block
from vlmcompress.hf_hooks import scorer_file
from vlmcompress.hf_hooks._attach import Attachment
from vlmcompress.hf_hooks.attaching import attach
from vlmcompress.models import VLM, read_json, spec_for
from vlmcompress.recipe.reducer import ReducerChoice


def attach_carried(
    model: Any, processor: Any, folder: str | Path, reducer: ReducerChoice | None = None
) -> Attachment | None:
    """Reduce the visual tokens of a transformers model from now on, as its checkpoint says.

    Args:
        model, processor: the results of `from_pretrained(folder)`.
        folder: folder of the checkpoint.
        reducer: a reducer to attach instead of the one that the checkpoint carries.

    Returns:
        The attached reducer, None for a checkpoint without one, whose model stays as it is.

    Raises:
        UserError: the block in config.json is not right, or the model cannot have its tokens reduced so.
    """
    config = read_json(Path(folder) / "config.json", "config")
    found = reducer_block.read(config)
    vlm = VLM(model, processor, spec_for(config), Path(folder))
    if reducer is not None:
        return attach(vlm, reducer)
    if found is None:
        return None
    return attach(vlm, scorer_file.known(model.config, found.reducer, Path(folder)), counter=found.count)
