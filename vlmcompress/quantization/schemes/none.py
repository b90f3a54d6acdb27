"""Leave the weights in 16 bits: for recipes that only reduce visual tokens, and as the baseline of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from vlmcompress.quantization.schemes._base import Needs, QuantizerOptions

PRESETS: dict[str, dict] = {"UNQUANTIZED": {}}


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """No options."""


def needs(options: Options) -> Needs:
    """No statistics: the scheme is data-free."""
    return Needs()


def scheme(options: Options) -> None:
    """Return None, as nothing is quantized."""
    return None
