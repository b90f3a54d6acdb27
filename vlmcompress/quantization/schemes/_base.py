"""What all schemes share: the base class of their options, and the required part of a scheme module's contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from vlmcompress.numerics import QTensor, Scheme, round_to_nearest

Search = Literal["ranges", "block_scales"]


@dataclass(frozen=True)
class Needs:
    """What a scheme, with its options, requires from a run.

    Attributes:
        statistics: a subset of {"gram", "absmax", "absmean", "gradient"}: statistics of a group's inputs
            (`statistics.inputs.GroupStats`, with a method of the same name for each), and gradients of the answers' loss;
            empty: the scheme needs no data. A run with data also collects the Gram matrix, to report errors.
        searches: searches that run the model, before the first block is solved: "block_scales", smoothing scales by the error
            of the block's output (`calibration.block_search`); "ranges", clipping ranges by the output of several blocks
            (`calibration.block_clip`).
    """

    statistics: frozenset[str] = frozenset()
    searches: frozenset[Search] = frozenset()


@dataclass(frozen=True)
class Smoothing:
    """Result of a scheme's `smooth` for a group.

    Attributes:
        scale: `[in]`, float32: the group's input is divided and its weights are multiplied by it; None: both stay as they are.
        factorization: a result of the search that `prepare` can reuse, once; None: there is none.
    """

    scale: Tensor | None = None
    factorization: Any = None


@dataclass(frozen=True)
class QuantizerOptions:
    """Base of every scheme's `Options`, with defaults for every property that the package reads from options.

    A field or property of a subclass overrides the property of the same name. Every field needs a default: `Options()` is the
    scheme's default behaviour.
    """

    @property
    def bits(self) -> int | None:
        """Bits per weight; None where the scheme has one width only."""
        return None

    @property
    def balance(self) -> Any:
        """Balance of the modalities in the statistics (`statistics.balance`); None where the scheme has no such option."""
        return None


@runtime_checkable  # a pydantic model of llm-compressor's kind has one in a field
class Quantizer(Protocol):
    """The functions that every scheme's module has. The other steps are optional, see the package."""

    __name__: str

    @property
    def Options(self) -> type[QuantizerOptions]:
        """The recipe's `options`."""

    def needs(self, options: Any) -> Needs:
        """Statistics and searches that the scheme requires with these options."""

    def scheme(self, options: Any) -> Scheme | None:
        """Number formats of the result; None: weights stay as they are, and `quantize` is never called."""

    def quantize(
        self, weight: Tensor, stats: Any, options: Any, scale_dtype: torch.dtype, prepared: Any = None
    ) -> QTensor:
        """Quantize `weight [out, in]` with the statistics of its input."""


def no_data(options: Any) -> Needs:
    """The `needs` of a scheme that reads no statistics."""
    return Needs()


def to_nearest(scheme: Callable[[Any], Scheme]) -> Callable[..., QTensor]:
    """Make a `quantize` function that rounds to nearest in the format of `scheme(options)`, without clipping."""

    def quantize(weight: Tensor, stats: Any, options: Any, scale_dtype: torch.dtype, prepared: Any = None) -> QTensor:
        return round_to_nearest(weight, scheme(options).weights, scale_dtype=scale_dtype)

    return quantize
