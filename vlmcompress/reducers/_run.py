"""Run methods, after checking that their signals are there, and check that the reduction is valid and meets its budget."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from vlmcompress.reducers._base import Grid, ReducerOptions, Reduction, Signals, rounded


def missing(method: ModuleType, signals: Signals) -> list[str]:
    """Names of the fields of `signals` that the method needs and that are missing, sorted."""
    return sorted(name for name in method.NEEDS if getattr(signals, name) is None)


def too_small(method: ModuleType, grid: Grid, options: ReducerOptions) -> bool:
    """Whether the share of such a grid's tokens would be none, so that it is kept whole."""
    if method.COUNT != "fixed" or method.STAGE == "pixels":  # where it is a share of the images
        return False
    keep = 1.0 if options.keep is None else options.keep
    return rounded(grid, keep) == 0 and method.budget(grid, options) == math.prod(grid)


@torch.no_grad()
def reduce(
    method: ModuleType, signals: Signals, options: ReducerOptions, count: int | None = None, check: bool = True
) -> Reduction:
    """What the method does with the tokens of one image. ValueError if a signal that it needs is missing.

    count: how many tokens are left, for a method that would decide it by the image; None: as the options say.
    check: whether to look at the result's values, too, for which the host waits; its lengths are looked at anyway.
    """
    if options.keep == 1 and count is None:
        return Reduction.identity(signals.n, signals.device)
    _check(method, signals)
    if count is not None:
        return _checked(method, method.reduce(signals, options, count), count, check)
    return _checked(method, method.reduce(signals, options), method.budget(signals.grid, options), check)


@torch.no_grad()
def merge(
    method: ModuleType,
    signals: Signals,
    options: ReducerOptions,
    layer: int,
    layers: int,
    count: int | None = None,
    check: bool = True,
) -> Reduction:
    """Decide the merges of one layer, by a method that merges layer by layer, on the rows that earlier layers have left.

    The caller chains the results, `merged = merged.then(merge(...))`; see `Merger`. `check`: as of `reduce`.
    """
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is none of the {layers} that merge")
    if options.keep == 1 and count is None:
        return Reduction.identity(signals.n, signals.device)
    _check(method, signals)
    result = method.merge(signals, options, layer, layers, count)
    final = method.budget(signals.grid, options) if count is None else count
    return _checked(method, result, final if layer == layers - 1 else None, check)


def _check(method: ModuleType, signals: Signals) -> None:
    if absent := missing(method, signals):
        raise ValueError(f"{method.__name__.rpartition('.')[2]} needs signals that are missing: {', '.join(absent)}")


def _checked(method: ModuleType, result: Reduction, count: int | None, check: bool) -> Reduction:
    if count is not None and len(result.anchor) != count:
        raise ValueError(f"{method.__name__} kept {len(result.anchor)} tokens, its budget is {count}")
    return result.check() if check else result
