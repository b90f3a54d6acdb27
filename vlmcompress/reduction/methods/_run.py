"""Run methods: check that their signals are present, that the reduction is valid, and that it meets its budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor

from vlmcompress.reduction.methods._base import Grid, Reducer, Reduction, Signals, rounded

_R = TypeVar("_R")
_T = TypeVar("_T")
_ENTRIES = 2**26  # most entries of the cosine tables of images that are reduced together


def missing(reducer: Reducer, signals: Signals) -> list[str]:
    """Names of the fields of `signals` that the method needs and that are missing, sorted."""
    return sorted(name for name in reducer.NEEDS if getattr(signals, name) is None)


def too_small(reducer: Reducer, grid: Grid) -> bool:
    """Whether the share rounds to no token, so that the grid keeps all."""
    if reducer.COUNT != "fixed":
        return False
    keep = 1.0 if reducer.keep is None else reducer.keep
    return rounded(grid, keep) == 0 and reducer.budget(grid) == math.prod(grid)


@torch.no_grad()
def reduce(reducer: Reducer, signals: Signals, check: bool = True) -> Reduction:
    """Reduce the tokens of one image. Raises ValueError if a required signal is missing.

    check: whether to check the result's values as well, which synchronizes with the device; lengths are always checked.
    """
    if reducer.keep == 1:
        return Reduction.identity(signals.n, signals.device)
    _require_signals(reducer, signals)
    return _require_valid(reducer, reducer.reduce(signals), reducer.budget(signals.grid), check)


@torch.no_grad()
def reduce_all(reducer: Reducer, images: Sequence[Signals], check: bool = True) -> list[Reduction]:
    """Reduce the tokens of each image; other arguments as in `reduce`.

    On an accelerator a BATCHED method processes all images of one shape together, with as many kernel launches as for one. On
    a CPU this gains nothing.
    """
    shapes = {_shapes(image) for image in images}
    alike = reducer.BATCHED and len(shapes) == 1 < len(images) and reducer.keep != 1
    if not alike or images[0].device.type == "cpu":
        return [reduce(reducer, image, check) for image in images]
    # Tables of cosines are [n, n] in float32: 2^26 entries are 256 MB.
    most, results = max(1, _ENTRIES // images[0].n ** 2), list[Reduction]()
    for start in range(0, len(images), most):
        results += _at_once(reducer, images[start : start + most])
    return [_require_valid(reducer, result, reducer.budget(images[0].grid), check) for result in results]


def grouped(
    pairs: Iterable[tuple[_R, _T]], reduce_all: Callable[[_R, list[_T]], Sequence[Reduction]]
) -> Iterator[Reduction]:
    """The reductions of images, each by a reducer of its own: neighbours with equal ones go to `reduce_all` together.

    Args:
        pairs: reducer, and what `reduce_all` takes of an image.
    """
    for reducer, group in itertools.groupby(pairs, key=itemgetter(0)):
        yield from reduce_all(reducer, [image for _, image in group])


def _shapes(image: Signals) -> tuple[object, ...]:
    """The shapes that images reduced together must share."""
    tensors = tuple(
        (name, value.shape, value.dtype) for name, value in vars(image).items() if isinstance(value, Tensor)
    )
    return image.grid, image.heads, image.merged, tensors


def _at_once(reducer: Reducer, images: Sequence[Signals]) -> list[Reduction]:
    """Run a method on all images of one shape at once."""
    _require_signals(reducer, images[0])
    names = [name for name, value in vars(images[0]).items() if isinstance(value, Tensor)]
    plain = False

    def decide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal plain
        image = Signals(images[0].grid, heads=images[0].heads, finite=True, **tensors)  # type: ignore[arg-type]
        result = reducer.reduce(image)
        plain = result.plain
        parts = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        return {name: value for name, value in parts.items() if isinstance(value, Tensor)}

    stacked = {name: torch.stack([getattr(image, name) for image in images]) for name in names}
    results = torch.vmap(decide)(stacked)
    return [
        Reduction(**{name: value[number] for name, value in results.items()}, plain=plain)
        for number in range(len(images))
    ]


@torch.no_grad()
def merge_layer(
    reducer: Reducer, signals: Signals, layer: int, layers: int, count: int | None = None, check: bool = True
) -> Reduction:
    """Decide the merges of one encoder layer, on the rows left by earlier layers.

    The caller chains the results, `merged = merged.then(merge_layer(...))`; see `Merger`. `check`: as in `reduce`; results that
    are padded for a device are checked only after the last layer, when there is no padding.
    """
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is none of the {layers} that merge")
    if reducer.keep == 1 and count is None:
        return Reduction.identity(signals.n, signals.device)
    _require_signals(reducer, signals)
    result = reducer.merge_layer(signals, layer, layers, count)
    # Only after the last layer the number of rows is what it has to be.
    last = layer == layers - 1
    final = reducer.budget(signals.grid) if count is None else count
    return _require_valid(reducer, result, final if last else None, check and (last or signals.device.type == "cpu"))


def _require_signals(reducer: Reducer, signals: Signals) -> None:
    if absent := missing(reducer, signals):
        raise ValueError(f"{_name(reducer)} needs signals that are missing: {', '.join(absent)}")


def _require_valid(reducer: Reducer, result: Reduction, count: int | None, check: bool) -> Reduction:
    if count is not None and len(result.anchor) != count:
        raise ValueError(f"{_name(reducer)} kept {len(result.anchor)} tokens, its budget is {count}")
    return result.require_valid() if check else result


def _name(reducer: Reducer) -> str:
    """The name of the reducer's module."""
    return type(reducer).__module__.rpartition(".")[2]
