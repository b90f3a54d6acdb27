"""Keep the weights in 16 bits: for recipes that only reduce visual tokens, and as the baseline of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from vlmcompress.quantization.schemes._base import QuantizerOptions, no_data

PRESETS: dict[str, dict] = {"UNQUANTIZED": {}}


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """No options."""


def scheme(options: Options) -> None:
    """Return None, as nothing is quantized."""
    return None


needs = no_data
