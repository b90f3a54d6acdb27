"""Attach a reducer to a model, with the kind of attachment that its method needs.

`attach_carried` takes the reducer that a checkpoint's config.json carries.

    model = AutoModelForImageTextToText.from_pretrained("OUT", dtype="auto")
    processor = AutoProcessor.from_pretrained("OUT")
    attach_carried(model, processor, "OUT")

transformers itself does not know the block and keeps all visual tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmcompress.models import VLM, read_json, spec_for
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import scorer_file, threshold_file
from vlmcompress.reduction.choice import ReducerChoice, make_choice
from vlmcompress.reduction.hooks._attach import Attachment
from vlmcompress.reduction.hooks._decoder import Inside
from vlmcompress.reduction.hooks._merging import Merging
from vlmcompress.reduction.hooks.early import Early
from vlmcompress.reduction.methods import Reducer, TokenCounter
from vlmcompress.reduction.support import require_counter, require_reducer


def attach(
    vlm: VLM, method: str | ReducerChoice, options: Mapping[str, Any] | None = None, counter: TokenCounter | None = None
) -> Attachment:
    """Reduce the visual tokens of `vlm` from now on.

    Args:
        vlm: the model; one reducer at a time (ValueError).
        method: name of a reducer, or one with its options (`vlmcompress.reduction.choice`).
        options: its options; default: its defaults.
        counter: computes how many tokens each image keeps, instead of the method (`dymu`), as when an engine serves it.

            Raises UserError if the method does not support this model (see `support.require_reducer`) or an option is wrong. An
            image whose kept share rounds to no token is kept whole, with one warning (`KeptWhole`) for all such images.
    """
    if isinstance(method, str):
        method = make_choice(method, options or {}, "reduce")
    require_reducer(vlm, method)
    method = threshold_file.require_thresholds(vlm, scorer_file.load_scorer(vlm.model.config, method))
    if counter is None:
        return _kind(method.reducer)(vlm, method)
    require_counter(vlm.model.config, method, counter)
    return Merging(vlm, method, counter)


def _kind(reducer: Reducer) -> type[Attachment]:
    """The class of attachment that applies a method."""
    if reducer.MERGES:
        return Merging
    return Inside if reducer.STAGE == "llm" else Early


def attach_carried(
    model: Any, processor: Any, folder: str | Path, reducer: ReducerChoice | None = None
) -> Attachment | None:
    """Reduce the visual tokens of a transformers model from now on, as its checkpoint says.

    Args:
        model, processor: the results of `from_pretrained(folder)`.
        folder: folder of the checkpoint.
        reducer: a reducer to attach instead of the one that the checkpoint carries.

    Returns:
        The attached reducer; None for a checkpoint without one, whose model does not change.

    Raises:
        UserError: the block in config.json is invalid, or its reducer does not support the model.
    """
    config = read_json(Path(folder) / "config.json", "config")
    carried = reducer_block.read_reducer(config)
    vlm = VLM(model, processor, spec_for(config), Path(folder))
    if reducer is not None:
        return attach(vlm, reducer)
    if carried is None:
        return None
    return attach(vlm, scorer_file.load_scorer(model.config, carried.reducer, Path(folder)), counter=carried.count)
