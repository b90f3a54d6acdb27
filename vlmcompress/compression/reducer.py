"""The reducer of visual tokens in a run: it learns what it has to, and calibration goes on behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmcompress.common.progress import Progress
from vlmcompress.models import VLM
from vlmcompress.planning.reducer import VisualTokens
from vlmcompress.recipe.reducer import ReducerChoice, calibrated, same
from vlmcompress.reducers import TokenCounter
from vlmcompress.reduction import learning, threshold_file

Samples = Sequence[Mapping[str, Any]]


def settled(
    reducer: ReducerChoice | None, vlm: VLM, samples: Samples, progress: Progress, known: ReducerChoice | None = None
) -> ReducerChoice | None:
    """The reducer with everything that it learns in place: from a file that it names, or from samples.

    Args:
        reducer: as the recipe asks for it; None for none.
        samples: for calibration, from `data.encode`.
        progress: called with (label, done, total).
        known: the reducer that statistics were collected behind; what it has learnt is taken from there.
    """
    if reducer is None or not hasattr(reducer.options, "thresholds"):
        return reducer
    if known is not None and same(known, reducer):
        return known
    return learning.learn(vlm, samples, reducer, progress) if samples else threshold_file.known(vlm, reducer)


def counter(
    tokens: VisualTokens | None, reducer: ReducerChoice | None, vlm: VLM, samples: Samples
) -> TokenCounter | None:
    """What says from an image's pixels how many tokens it keeps, fitted to calibration samples; None where nothing has to.

    Args:
        tokens: what the plan says of the reducer.
        reducer: the same with what it has learnt.
    """
    return learning.counter(vlm, samples, reducer) if tokens and tokens.counted else None


def warnings(reducer: ReducerChoice | None, origin: Mapping[str, Any] | None) -> list[str]:
    """What went otherwise than asked for. `origin`: where statistics came from, None for no calibration."""
    if reducer is None or origin is None or calibrated(reducer):
        return []
    return [f"calibrated on all visual tokens, as {reducer} drops some only within the language model"]
