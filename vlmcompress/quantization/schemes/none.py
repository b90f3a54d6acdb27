"""Keep the weights in 16 bits: for recipes that only reduce visual tokens, and as the baseline of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from vlmcompress.quantization.schemes._base import Quantizer, QuantizerOptions


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """No options."""


class Unquantized(Quantizer[Options]):
    """The scheme `none`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"UNQUANTIZED": {}}

    @override
    def scheme(self, options: Options) -> None:
        """Return None, as nothing is quantized."""
        return None


SCHEME = Unquantized()
