"""Settle the reducer of visual tokens in a run, before calibration goes on behind it: learn its numbers from samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmcompress.common.progress import Progress
from vlmcompress.hf_hooks import learning, scorer_file, threshold_file
from vlmcompress.models import VLM
from vlmcompress.planning.reducer import VisualTokens
from vlmcompress.recipe.reducer import ReducerChoice, calibrated, same
from vlmcompress.reducers import TokenCounter

Samples = Sequence[Mapping[str, Any]]


def settled(
    reducer: ReducerChoice | None, vlm: VLM, samples: Samples, progress: Progress, known: ReducerChoice | None = None
) -> ReducerChoice | None:
    """Return the reducer with all learnt numbers in place, taken from a file that it names or learnt from samples.

    Args:
        reducer: the reducer as the recipe asks for it; None for none.
        samples: calibration samples, from `data.encode`; empty: the numbers come from the file that the reducer names.
        progress: called with (label, done, total).
        known: the reducer that statistics were collected behind, whose learnt numbers are taken over.
    """
    if reducer is None:
        return None
    reducer = scorer_file.known(vlm.model.config, reducer)
    if not reducer.options.learns:
        return reducer
    if known is not None and same(known, reducer):
        thresholds = known.options.thresholds
        return reducer.with_thresholds(thresholds) if isinstance(thresholds, tuple) else known
    return learning.learn(vlm, samples, reducer, progress) if samples else threshold_file.known(vlm, reducer)


def counter(
    tokens: VisualTokens | None, reducer: ReducerChoice | None, vlm: VLM, samples: Samples
) -> TokenCounter | None:
    """Fit to calibration samples how many tokens an image keeps, as a function of its pixels; None if nothing needs it.

    Args:
        tokens: the plan's description of the reducer.
        reducer: the reducer with all learnt numbers in place.
    """
    return learning.counter(vlm, samples, reducer) if reducer and tokens and tokens.counted else None


def warnings(reducer: ReducerChoice | None, origin: Mapping[str, Any] | None) -> list[str]:
    """Warnings about the reducer. `origin`: the manifest's description of the calibration data, None for none."""
    if reducer is None or origin is None or calibrated(reducer):
        return []
    return [f"calibrated on all visual tokens, as {reducer} drops some only within the language model"]
