"""What all schemes share: the contract, and the base class of their options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from vlmcompress.numerics import QTensor, Scheme, round_to_nearest


@dataclass(frozen=True)
class Needs:
    """What a scheme, with its options, requires from a run.

    Attributes:
        statistics: a subset of {"gram", "absmax", "absmean", "gradient"}: statistics of a group's inputs
            (`statistics.inputs.GroupStats`, with a method of the same name for each), and gradients of the answers' loss;
            empty: the scheme needs no data. A run with data also collects the Gram matrix, to report errors.
        block_scales: smoothing scales from a search by the error of the block's output, which runs the unquantized model
            before the first block is solved (`calibration.block_search`).
    """

    statistics: frozenset[str] = frozenset()
    block_scales: bool = False


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


OptionsT = TypeVar("OptionsT", bound=QuantizerOptions, contravariant=True)


class Quantizer(ABC, Generic[OptionsT]):
    """The contract of a scheme, with default methods. A file ends with an instance: `SCHEME = Rtn()`.

    `stats` are the `GroupStats` of a group's input, with what `needs` names; None without data.

    Attributes:
        OPTIONS: the recipe's `options`, checked when made; `OPTIONS()` is the default behaviour.
        ALIASES: other names that users know it by, in lower case, a literal; recipes and manifests have the file's name.
        PRESETS: preset of compressed-tensors that it is -> options, a literal.
        PREPARED_BY: options that `prepare` reads besides the statistics; empty: unknown. Equal ones share its result where
            errors are predicted.
    """

    OPTIONS: ClassVar[type[QuantizerOptions]]
    ALIASES: ClassVar[tuple[str, ...]] = ()
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    PREPARED_BY: ClassVar[tuple[str, ...]] = ()

    # `schemes.solve` calls these for each group, in this order: `smooth` (in another pass, as a scale changes the op before),
    # `prepare`, `quantize_group` with `quantize`, `input_scale`. `sketch` serves predictions of errors, for `bits`.

    @abstractmethod
    def scheme(self, options: OptionsT) -> Scheme | None:
        """Number formats of the result; None: weights stay as they are, and `quantize` is never called."""

    def needs(self, options: OptionsT) -> Needs:
        """What the scheme requires with these options; by default no data."""
        return Needs()

    def smooth(
        self,
        weights: list[Tensor],
        stats: Any,
        options: OptionsT,
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> Smoothing:
        """A scale `[in]` for the weights `[out_i, in]` of a group, by which the op before is divided and the weights are
        multiplied; by default none."""
        return Smoothing()

    def prepare(self, weights: list[Tensor], stats: Any, options: OptionsT, factorization: Any = None) -> Any:
        """Work shared by a group, passed on as `prepared`. `factorization`: that of `smooth`, or None."""
        return None

    def warnings(self, prepared: Any) -> Sequence[tuple[str, str]]:
        """Deviations of what was prepared from what the options ask for: pairs (deviation, details)."""
        return ()

    def quantize(
        self, weight: Tensor, stats: Any, options: OptionsT, scale_dtype: torch.dtype, prepared: Any = None
    ) -> QTensor:
        """The rounded weight `[out, in]`; by default to nearest, without clipping."""
        scheme = self.scheme(options)
        assert scheme is not None
        return round_to_nearest(weight, scheme.weights, scale_dtype=scale_dtype)

    def quantize_group(
        self,
        weights: list[Tensor],
        stats: Any,
        options: OptionsT,
        scale_dtype: torch.dtype,
        prepared: Any = None,
    ) -> list[QTensor]:
        """`quantize` of a group's weights, for a scheme that is faster with all at once."""
        return [self.quantize(weight, stats, options, scale_dtype, prepared) for weight in weights]

    def sketch(
        self, weight: Tensor, stats: Any, options: OptionsT, scale_dtype: torch.dtype, prepared: Any = None
    ) -> Tensor:
        """The error `q - w` of `quantize` on rows `[rows, in]`, or a cheap estimate of it."""
        quantized = self.quantize(weight, stats, options, scale_dtype, prepared)
        return quantized.dequantize(torch.float32).sub_(weight)

    def input_scale(self, stats: Any, options: OptionsT) -> Tensor | None:
        """Static scale `[1]` of the activations (of NVFP4 their global scale); None: these options round none."""
        return None

    def other(self, group: str, layer: int, layers: int, options: OptionsT) -> tuple[str, dict[str, Any]] | None:
        """What a group of the decoder gets instead: (scheme, its options); None: this scheme.

        Args:
            group: its name in the family (`models.LinearGroup`).
            layer: its block, of `layers`.
        """
        return None
