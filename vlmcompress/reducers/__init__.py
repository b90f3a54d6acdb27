"""Visual-token reducers, one method a file; the file's name is `reduce.method` of a recipe.

A reducer is pure: signals of one image in, what becomes of each of its tokens out (`Reduction`). It knows no model and no
other image. A module of this folder has

    STAGE       where its signals come from: "pixels" (before the encoder), "encoder" (in or right after it, before the
                projector), "projected" (the rows that the language model would get), "llm" (within the language model)
    NEEDS       fields of `Signals` that it cannot do without; OPTIONAL, where there are any: fields used when they are given
    COUNT       "fixed": an image of one size always keeps the same number of tokens; "adaptive": it depends on the image
    SERVED      whether an engine with one token count for all layers, fixed before the encoder runs, can serve it;
                WHY_NOT says why when it cannot
    Options     frozen dataclass: the recipe's options, checked when made (ValueError)
    budget(grid, options) -> int | None     exactly how many tokens an image keeps; None when COUNT is adaptive

and one of

    reduce(signals, options) -> Reduction                   at once; `options.layer` says where, for stage "llm"
    merge(signals, options, layer, layers) -> Reduction     a bit in each of the encoder's `layers`; `signals.merged` is what
                                                            the layers before made of the grid

A method that restricts attention and keeps all tokens has, besides a `reduce` that is the identity, a `mask` (see `pevlm`).
`reduce` and `merge` below check and run them. Every method is deterministic (equal scores go to the lower index), computes in
float32 whatever the dtype, keeps raster order, and returns all tokens untouched for `keep: 1`. An image of which the share
`keep` would be no token is kept whole. To add a reducer, add a file.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from vlmcompress.reducers._base import Grid, Reduction, Signals
from vlmcompress.registry import Registry

__all__ = ["REGISTRY", "Grid", "Reduction", "Signals", "merge", "missing", "reduce"]

REGISTRY = Registry("vlmcompress.reducers", "reducer")


def missing(method: ModuleType, signals: Signals) -> list[str]:
    """Fields of `signals` that the method needs and that are not there, sorted."""
    return sorted(name for name in method.NEEDS if getattr(signals, name) is None)


@torch.no_grad()
def reduce(method: ModuleType, signals: Signals, options: Any) -> Reduction:
    """What the method does with the tokens of one image. ValueError if a signal that it needs is missing."""
    if getattr(options, "keep", None) == 1:
        return Reduction.identity(signals.n, signals.device)
    _check(method, signals)
    return _checked(method, method.reduce(signals, options), method.budget(signals.grid, options))


@torch.no_grad()
def merge(method: ModuleType, signals: Signals, options: Any, layer: int, layers: int) -> Reduction:
    """What a method that merges layer by layer does with the rows that the layers before have left.

    The caller chains the results: `merged = merged.then(merge(...))`.
    """
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is none of the {layers} that merge")
    if getattr(options, "keep", None) == 1:
        return Reduction.identity(signals.n, signals.device)
    _check(method, signals)
    result = method.merge(signals, options, layer, layers)
    return _checked(method, result, method.budget(signals.grid, options) if layer == layers - 1 else None)


def _check(method: ModuleType, signals: Signals) -> None:
    if absent := missing(method, signals):
        raise ValueError(f"{method.__name__.rpartition('.')[2]} needs signals that are missing: {', '.join(absent)}")


def _checked(method: ModuleType, result: Reduction, count: int | None) -> Reduction:
    if count is not None and len(result.anchor) != count:
        raise ValueError(f"{method.__name__} kept {len(result.anchor)} tokens, its budget is {count}")
    return result.check()
