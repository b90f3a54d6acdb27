"""Round to nearest (W4A16): every weight goes to the closest code of its group, no data needed.

The baseline that every calibrated method has to beat. Costs one pass over the weights. Loses the most at 4 bits and
below, where a few large input channels make small weight errors matter; at 8 bits it is as good as the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from vlmcompress.numerics import Scheme, weight_only
from vlmcompress.quantization.schemes._base import Quantizer, QuantizerOptions


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`bits` per weight, `group_size` columns that share a scale (-1: a whole row), `symmetric`: no zero points."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        SCHEME.scheme(self)


class Rtn(Quantizer[Options]):
    """The scheme `rtn`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: integer weights, 16-bit activations."""
        return weight_only(options.bits, options.group_size, options.symmetric)


SCHEME = Rtn()
