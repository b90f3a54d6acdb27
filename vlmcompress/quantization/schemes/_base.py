"""What all schemes share: the base of their options, and the part of the contract that every module has."""

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
    """What a scheme, with its options, requires of the run that quantizes with it.

    Attributes:
        statistics: what is read of a group's inputs (`statistics.inputs`), and "gradient" for the gradients of the answers'
            loss; empty: the scheme needs no data. Where there are any, a run collects the Gram matrix as well, by which it
            reports errors.
        prefix: what is quantized already where a group's inputs are captured: the "blocks" before its own, or also the
            "groups" before it in its own block.
        searches: what the model itself decides, as statistics cannot, before the first block: "block_scales", smoothing scales
            by the error of the block's output (`calibration.block_search`); "ranges", clipping ranges by the output of
            several blocks (`calibration.block_clip`).
    """

    statistics: frozenset[str] = frozenset()
    prefix: Literal["blocks", "groups"] = "blocks"
    searches: frozenset[Search] = frozenset()


@dataclass(frozen=True)
class Smoothing:
    """What a scheme's `smooth` found for a group.

    Attributes:
        scale: `[in]`, float32: the group's input is divided and its weights are multiplied by it; None: both stay as they are.
        factor: what the search computed from the statistics and `prepare` continues from, once; None: nothing.
    """

    scale: Tensor | None = None
    factor: Any = None


@dataclass(frozen=True)
class QuantizerOptions:
    """Base of every scheme's `Options`, with defaults for every property that the package reads from options.

    A field or property of a subclass replaces the property of the same name. Every field has a default, as `Options()` is
    what a scheme does by default.
    """

    @property
    def bits(self) -> int | None:
        """Bits per weight; None where the scheme has one width only."""
        return None

    @property
    def balance(self) -> Any:
        """How the modalities are weighed in the statistics (`statistics.balance`); None where the scheme does not choose."""
        return None


@runtime_checkable  # a pydantic model of llm-compressor's kind has one in a field
class Quantizer(Protocol):
    """A scheme's module as callers see it: what every module has. Its further steps are optional, see the package."""

    __name__: str

    @property
    def Options(self) -> type[QuantizerOptions]:
        """The recipe's `options`."""

    def needs(self, options: Any) -> Needs:
        """Statistics, prefix and searches that the scheme requires with these options."""

    def scheme(self, options: Any) -> Scheme | None:
        """Number formats of the result; None: the weights are left alone, and there is no `quantize`."""

    def quantize(
        self, weight: Tensor, stats: Any, options: Any, scale_dtype: torch.dtype, prepared: Any = None
    ) -> QTensor:
        """`weight [out, in]` quantized with the statistics of its input."""


def no_data(options: Any) -> Needs:
    """The `needs` of a scheme that reads no statistics."""
    return Needs()


def to_nearest(scheme: Callable[[Any], Scheme]) -> Callable[..., QTensor]:
    """The `quantize` of a scheme of these number formats that rounds to nearest, in ranges that cover all."""

    def quantize(weight: Tensor, stats: Any, options: Any, scale_dtype: torch.dtype, prepared: Any = None) -> QTensor:
        return round_to_nearest(weight, scheme(options).weights, scale_dtype=scale_dtype)

    return quantize
