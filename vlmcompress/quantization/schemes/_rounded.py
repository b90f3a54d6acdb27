"""Three ways of rounding weights to a fixed number format, shared by several schemes.

To nearest (`rounding: rtn`), with GPTQ's error feedback (`gptq`, which works for any format whose scales are fixed
beforehand), or with AWQ's search for channel scales and clipped ranges (`awq`). A scheme's class extends `Rounded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.numerics import Format, QTensor, find_global_scale, find_params, quantize_with, residual
from vlmcompress.numerics.statistics.balance import require_balance
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes import awq, gptq
from vlmcompress.quantization.schemes._base import Needs, Quantizer, QuantizerOptions, Smoothing
from vlmcompress.quantization.schemes._columns import Feedback, propagated_error, quantize_columns

_READ = {"rtn": (), "gptq": ("gram",), "awq": ("gram", "absmean")}

_STEPS = ("smooth", "clip", "sweeps")
Params = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`rounding`: "rtn", "gptq" or "awq"; `damp`, `smooth`, `clip`, `sweeps`: as in gptq, whose rounding
    they belong to; `balance`: see `statistics.balance`."""

    rounding: str = "gptq"
    damp: float = 0.01
    smooth: Any = "off"  # YAML reads a bare `off` as False
    clip: bool = False
    sweeps: int = 0
    balance: Any = "off"

    def __post_init__(self) -> None:
        object.__setattr__(self, "balance", require_balance(self.balance))
        if self.rounding not in _READ:
            raise ValueError(f"rounding must be 'rtn', 'gptq' or 'awq', got {self.rounding!r}")
        object.__setattr__(self, "smooth", "off" if self.smooth is False else self.smooth)
        _ = self.feedback  # checks damp and the steps
        changed = [
            each.name for each in fields(self) if each.name in _STEPS and getattr(self, each.name) != each.default
        ]
        if self.rounding != "gptq" and changed:
            raise ValueError(f"{' and '.join(changed)} are for rounding 'gptq', got rounding {self.rounding!r}")

    @property
    def smoothing(self) -> str:
        """Which search for channel scales is used: "off", "awq" or "feedback"."""
        return {"rtn": "off", "awq": "awq"}.get(self.rounding, self.smooth)

    @property
    def feedback(self) -> gptq.Options:
        """The corresponding options of gptq."""
        steps = {name: getattr(self, name) for name in _STEPS}
        return gptq.Options(damp=self.damp, **steps)

    @property
    def max_code(self) -> float | None:
        """The code that the largest value of a block is mapped to; None: the one of the format's with the smallest error."""
        return None


@dataclass(frozen=True)
class WithSteps(Options):
    """`Options` whose defaults enable the steps of gptq-plus."""

    smooth: Any = "feedback"
    clip: bool = True
    sweeps: int = 2


@dataclass(frozen=True)
class Prepared:
    """What the layers of a group share: NVFP4's global scale `[1]`, GPTQ's feedback, the Gram matrix for clipping, and
    warnings."""

    global_scale: Tensor | None
    feedback: Feedback | None
    gram: Tensor | None
    warnings: tuple[tuple[str, str], ...] = ()


RoundedT = TypeVar("RoundedT", bound=Options, contravariant=True)


class Rounded(Quantizer[RoundedT]):
    """The steps of a scheme whose weights have the format `FORMAT`."""

    FORMAT: ClassVar[Format]
    PREPARED_BY: ClassVar[tuple[str, ...]] = ("rounding", "damp", "balance")

    def kept(self, scale: Tensor) -> Tensor:
        """Scales `[out, n_groups]` as they are stored, before anything is rounded with them; by default unchanged."""
        return scale

    @override
    def warnings(self, prepared: Prepared) -> Sequence[tuple[str, str]]:
        """Those of error feedback."""
        return prepared.warnings

    @override
    def needs(self, options: RoundedT) -> Needs:
        """The statistics that the rounding reads."""
        return Needs(frozenset(_READ[options.rounding if options.smoothing == "off" else "awq"]))

    @override
    def smooth(
        self,
        weights: list[Tensor],
        stats: GroupStats | None,
        options: RoundedT,
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> Smoothing:
        """The best of AWQ's scales `[in]` for the weights `[out_i, in]` that share an input; none if the options turn it
        off."""
        if stats is None or options.smoothing == "off":
            return Smoothing()
        # AWQ's scales, compared by AWQ's error or by the error that remains after GPTQ's feedback.
        scales = awq.candidates(weights, stats, awq.Options(group_size=self.FORMAT.group))
        if options.smoothing == "feedback":
            return gptq.smooth_for_feedback(weights, scales, stats, options.feedback, self.FORMAT, scale_dtype)
        return Smoothing(
            awq.scale_of_least_error(weights, scales, stats.gram(), self.FORMAT, scale_dtype, options.max_code)
        )

    @override
    def prepare(
        self,
        weights: list[Tensor],
        stats: GroupStats | None,
        options: RoundedT,
        factorization: gptq.Factorization | None = None,
    ) -> Prepared:
        """Compute the group's global scale, and what its rounding needs from the Gram matrix."""
        # vLLM takes the largest global scale of what it fuses and applies it to the scales of all of them.
        shared = find_global_scale(weights) if self.FORMAT.nvfp4 else None
        if options.rounding == "gptq":
            assert stats is not None
            feedback = gptq.SCHEME.prepare(weights, stats, options.feedback, factorization)
            return Prepared(shared, feedback, None, feedback.warnings)
        return Prepared(shared, None, stats.gram() if options.rounding == "awq" and stats else None)

    @override
    def quantize(
        self,
        weight: Tensor,
        stats: GroupStats | None,
        options: RoundedT,
        scale_dtype: torch.dtype,
        prepared: Prepared | None = None,
    ) -> QTensor:
        """Round `weight [out, in]`, smoothed already."""
        return self.quantize_group([weight], stats, options, scale_dtype, prepared)[0]

    @override
    def quantize_group(
        self,
        weights: list[Tensor],
        stats: GroupStats | None,
        options: RoundedT,
        scale_dtype: torch.dtype,
        prepared: Prepared | None = None,
    ) -> list[QTensor]:
        """Round the weights `[out_i, in]` of a group, for NVFP4 with one global scale."""
        ready = self.prepare(weights, stats, options) if prepared is None else prepared
        params = [self._params(w, ready, stats, options, scale_dtype) for w in weights]
        if ready.feedback is None or stats is None:
            pairs = zip(weights, params, strict=True)
            return [quantize_with(w, *each, self.FORMAT, ready.global_scale) for w, each in pairs]
        kwargs: dict[str, Any] = {"sweeps": options.sweeps, "global_scale": ready.global_scale}
        return quantize_columns(weights, ready.feedback, params, self.FORMAT, **kwargs)

    @override
    def sketch(
        self,
        weight: Tensor,
        stats: GroupStats | None,
        options: RoundedT,
        scale_dtype: torch.dtype,
        prepared: Prepared | None = None,
    ) -> Tensor:
        """Estimate the error `q - w [out, in]` of `quantize`; as GPTQ does."""
        ready = self.prepare([weight], stats, options) if prepared is None else prepared
        error = residual(weight, *self._params(weight, ready, stats, options, scale_dtype), self.FORMAT).neg_()
        return error if ready.feedback is None else propagated_error(error, ready.feedback)

    def _params(
        self, weight: Tensor, ready: Prepared, stats: GroupStats | None, options: RoundedT, scale_dtype: torch.dtype
    ) -> Params:
        """Scales of `weight [out, in]` before its codes are found."""
        kwargs: dict[str, Any] = {"scale_dtype": scale_dtype, "global_scale": ready.global_scale}
        if ready.feedback is not None and stats is not None and options.clip:
            scale, zero = gptq.ranges(weight, ready.feedback, stats, self.FORMAT, options, **kwargs)
        else:
            kwargs["max_code"] = options.max_code
            if ready.gram is not None:
                scale, zero = awq.clipped(weight, ready.gram, self.FORMAT, **kwargs)
            else:
                counts = stats.importance() if ready.feedback is not None and stats is not None else None
                scale, zero = find_params(weight, self.FORMAT, importance=counts, **kwargs)
        # Scales are converted as the kernel will convert them before codes are computed, so that the codes fit the result.
        return self.kept(scale), zero
