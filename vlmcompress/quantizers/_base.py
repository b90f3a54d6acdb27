"""What all schemes share: the base of their options, and the part of the contract that every module has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vlmcompress.numerics import QTensor, Scheme


@dataclass(frozen=True)
class QuantizerOptions:
    """Base of every scheme's `Options`: what the package asks of options, whatever the scheme is.

    The answers here are those of a scheme that has no such option. A field or property of a subclass takes the place of the
    one whose name it has. Every field has a default, as `Options()` is what a scheme does unless told otherwise.
    """

    @property
    def needs(self) -> frozenset[str] | None:
        """Statistics that are read with these options, where that depends on them; None: the scheme's `NEEDS`."""
        return None

    @property
    def bits(self) -> int | None:
        """Bits per weight; None where the scheme has one width only."""
        return None

    @property
    def balance(self) -> Any:
        """How the modalities are weighed in the statistics (`statistics.balance`); None where the scheme does not choose."""
        return None

    @property
    def tokens(self) -> str:
        """How single tokens are weighed before statistics are collected (`calibration.token_weights`); "off": not at all."""
        return "off"

    @property
    def behind(self) -> str:
        """What is quantized already where a group's input is observed: the "blocks" before, or the "groups" before it, too."""
        return "blocks"

    @property
    def objective(self) -> str | None:
        """What smoothing scales are searched by: "gram", the statistics alone; another one, the model itself (see
        `calibration.block_search`); None where there is no such choice."""
        return None


@runtime_checkable  # a pydantic model of llm-compressor's kind has one in a field
class Quantizer(Protocol):
    """A scheme's module as callers see it: what every module has. Its further steps are optional, see the package."""

    __name__: str

    @property
    def NEEDS(self) -> frozenset[str]:
        """Statistics that the scheme reads; empty: it needs no data."""

    @property
    def Options(self) -> type[QuantizerOptions]:
        """The recipe's `options`."""

    def scheme(self, options: Any) -> Scheme | None:
        """Number formats of the result; None: the weights are left alone, and there is no `quantize`."""

    def quantize(
        self, weight: Tensor, stats: Any, options: Any, scale_dtype: torch.dtype, prepared: Any = None
    ) -> QTensor:
        """`weight [out, in]` quantized with the statistics of its input."""
