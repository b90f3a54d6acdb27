"""GPTQ (arXiv 2210.17323): round the columns of a weight one after another, and correct the remaining ones after each.

With `H = X^T X` the output error of a row is `(w - q) H (w - q)^T`. Fixing the columns in order, the best correction
of column i for the errors made before it follows from a triangular factor `H = R R^T`, `R` upper triangular (the
Cholesky factor in reversed order), because then `(w - q) H (w - q)^T = ||(w - q) R||^2` and

    q_i = Q( w_i + sum_{j<i} (w_j - q_j) R_ji / R_ii )

makes the i-th term of that norm as small as rounding allows. This is exactly GPTQ, in the form of LDLQ (QuIP, arXiv
2307.13304, which proves the two equal) and of Babai's nearest plane algorithm (arXiv 2507.18553). It needs no inverse of H:
one Cholesky factorization per group, shared by all layers with the same input, instead of two and an inversion.

Scales are computed from the original weights: from plain ranges, or with `clip` from the ranges with the smallest squared
error, where column i has the weight `R_ii^2` as in the norm above (`_ranges`). `smooth: awq` first scales input channels by
AWQ's search; `smooth: feedback` compares AWQ's candidates by that same norm instead, which takes error feedback into account.
Columns are rounded a block at a time (`_columns`), and `sweeps` of local search then change single codes of the block
(`_local_search`). `actorder: static` rounds columns in the order of the decreasing diagonal of H while groups stay in place,
so the engine needs no index; it is at least as accurate and costs nothing at serving time.

Cost: `in^3 / 3` once per group and `out * in^2` for each layer. Loses: it may overfit few calibration tokens (hence the
damping). With fewer tokens than inputs, H is singular, and only the damping determines how corrections are split among
inputs that the tokens do not distinguish. A warning says so, and another one says when more than `damp` was needed (ten
times more until H can be factorized); the larger the damping, the closer the result is to rounding to nearest.

`balance` makes it modality-weighted: H is then the weighted sum of the modalities' Gram matrices (`statistics.balance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.numerics import Format, QTensor, Scheme, find_params, residual, weight_only
from vlmcompress.numerics.statistics.balance import require_balance
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes import awq
from vlmcompress.quantization.schemes._base import Needs, Quantizer, QuantizerOptions, Smoothing
from vlmcompress.quantization.schemes._columns import Feedback, propagated_error, quantize_columns
from vlmcompress.quantization.schemes._ranges import ranges_of_least_error

_FACTORED = 256  # columns factorized at a time
_ATTEMPTS = 8  # factorizations that are tried, each with more damping
_DAMP_GROWTH = 10  # damping of an attempt relative to the one before


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`bits`, `group_size`, `symmetric` as in rtn; `damp`: share of the mean diagonal added to H; `actorder`: "static" or null;
    `smooth`: "off", "awq" for its channel scales, or "feedback" for the one of them with the smallest error after GPTQ;
    `clip`: search the ranges; `sweeps`: sweeps of local search; `balance`: see `statistics.balance`."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    damp: float = 0.01
    actorder: str | None = "static"
    smooth: Any = "off"  # YAML reads a bare `off` as False
    clip: bool = False
    sweeps: int = 0
    balance: Any = "off"

    def __post_init__(self) -> None:
        SCHEME.scheme(self)
        object.__setattr__(self, "smooth", "off" if self.smooth is False else self.smooth)
        if self.smooth not in ("off", "awq", "feedback"):
            raise ValueError(f"smooth must be 'off', 'awq' or 'feedback', got {self.smooth!r}")
        if not isinstance(self.clip, bool):
            raise ValueError(f"clip must be true or false, got {self.clip!r}")
        if type(self.sweeps) is not int or self.sweeps < 0:
            raise ValueError(f"sweeps must be a whole number of at least 0, got {self.sweeps!r}")
        object.__setattr__(self, "balance", require_balance(self.balance))
        if isinstance(self.damp, bool) or not isinstance(self.damp, int | float) or not 0 < self.damp <= 1:
            raise ValueError(f"damp must be a number above 0 and at most 1, got {self.damp!r}")
        if self.actorder not in ("static", None):
            raise ValueError(f"actorder must be 'static' or null, got {self.actorder!r}")


@dataclass(frozen=True)
class Factorization:
    """The error feedback of inputs divided by `scale [in]`."""

    feedback: Feedback
    scale: Tensor


def smooth_for_feedback(
    weights: list[Tensor],
    scales: list[Tensor],
    stats: GroupStats,
    options: Options,
    fmt: Format,
    scale_dtype: torch.dtype,
) -> Smoothing:
    """Choose from `scales`, AWQ's candidates, each `[in]`, the one with the smallest error of the weights `[out_i, in]` after
    error feedback; none if 1 is best.

    With inputs divided by s the factor of H is `S^-1 R`, so column j has the weight `residual_weight_j / s_j^2`, in the same
    order. The weighted squared errors of rounding `W s` to nearest need no matrix product: this costs less than AWQ's own
    search, which ignores feedback.

    Damping and column order should be those of the smoothed inputs, whose scale is not known yet: they are taken from inputs
    divided by the middle one of AWQ's candidates with weights. `prepare` continues from that factor.
    """
    middle = scales[len(scales) * 3 // 4]  # the second half of the candidates includes weights
    feedback = _factorized(stats.rescaled(middle), options)
    residual_weight = feedback.residual_weight * middle.square()  # R_jj^2 for unscaled inputs

    def remaining_error(rows: Tensor, tried: Tensor) -> Tensor:
        # With H_s = S^-1 H S^-1 the factor is S^-1 R, and the error of W s is s D: (s_j D_j)^2 R_jj^2 / s_j^2 = D_j^2 R_jj^2.
        d = awq.errors(rows, tried, residual_weight, fmt, scale_dtype, fmt.max_codes[0])  # D [k, rows, in]
        return (d.square_() @ residual_weight).sum(1, dtype=torch.float64)

    divided = middle if stats.scale is None else middle * stats.scale
    return Smoothing(awq.best_scale(weights, scales, remaining_error), Factorization(feedback, divided))


def _factorized(stats: GroupStats, options: Options) -> Feedback:
    """Factorize the Gram matrix of `stats`."""
    damp = options.damp
    for _ in range(_ATTEMPTS):
        # H = X^T X [in, in] float32; the paper's H is twice that, which changes no quotient R_ji / R_ii.
        h = stats.gram()
        diagonal = h.diagonal().clone()
        # Inputs that are always zero: with any positive diagonal their weights are rounded to nearest.
        dead = diagonal == 0
        diagonal[dead] = 1.0 if dead.all() else diagonal[~dead].mean()
        # The paper adds 1% of the mean diagonal (step 3, Cholesky reformulation), as H is singular where inputs are linearly
        # dependent.
        diagonal += damp * diagonal.mean()
        order = torch.arange(len(h), device=h.device)
        if options.actorder == "static":
            # "act-order" of the authors' code: columns of large inputs first, while many others can still compensate for their
            # errors.
            order = diagonal.argsort(descending=True, stable=True)
        h = reordered(h, order)
        h.diagonal().copy_(diagonal[order])
        if factorize(h):
            warnings = _warnings(stats.tokens, int((~dead).sum()), damp, options)
            # `h` holds R^T now. Row i divided by its pivot R_ii has the corrections of column i: R_ji / R_ii for j < i.
            pivots, residual_weight = h.diagonal().clone(), torch.zeros_like(diagonal)
            residual_weight[order] = pivots.square()
            return Feedback(order, h.div_(pivots[:, None]), residual_weight.masked_fill_(dead, 0), pivots, warnings)
        damp *= _DAMP_GROWTH
    raise ValueError("the Gram matrix of the calibration statistics cannot be factorized; collect them again")


def reordered(h: Tensor, order: Tensor) -> Tensor:
    """Lower block triangle of `h [in, in]` with rows and columns in `order`; 0 elsewhere."""
    reordered = torch.zeros_like(h)
    for a in range(0, len(h), _FACTORED):
        b = min(a + _FACTORED, len(h))
        reordered[a:b, :b] = h.index_select(0, order[a:b]).index_select(1, order[:b])
    return reordered


def factorize(h: Tensor) -> bool:
    """Factor `h [in, in]`, a lower block triangle, as `R R^T` with `R` upper triangular; write `R^T` over it.

    Works block by block from the last one, as R is the Cholesky factor of `h` with rows and columns reversed, and in place, as
    `h` may be the largest tensor of the run. Returns whether `h` is positive definite.
    """
    failed = []  # read once, after the last block, to synchronize with the device only once
    for a in reversed(range(0, len(h), _FACTORED)):
        b = min(a + _FACTORED, len(h))
        # [256, b]: rows a to b of H - R_after R_after^T, what remains after the later blocks.
        panel = h[a:b, :b].addmm_(h[b:, a:b].T, h[b:, :b], alpha=-1) if b < len(h) else h[a:b]
        # U U^T with U upper triangular is Cholesky's L L^T of the block with rows and columns reversed.
        lower, info = torch.linalg.cholesky_ex(panel[:, a:].flip(0, 1))
        upper = lower.flip(0, 1)
        panel[:, a:] = upper.T
        # The columns before: R_(<a, block) from R_(<a, block) U^T = H_(<a, block), written as its transpose.
        panel[:, :a] = torch.linalg.solve_triangular(upper, panel[:, :a], upper=True)
        failed.append(info)
    return not torch.stack(failed).any()


def _warnings(tokens: int, inputs: int, damp: float, options: Options) -> tuple[tuple[str, str], ...]:
    """Warn of a Gram matrix that is singular or needed more damping; `inputs`: those that are not always zero."""
    warnings, remedy = [], "use more --samples, or raise calibrate.tokens where it is set"
    if tokens < inputs:
        what = f"GPTQ had fewer tokens than a layer has inputs: its Gram matrix is singular without damping; {remedy}"
        warnings.append((what, f"{tokens} tokens, {inputs} inputs"))
    if damp > options.damp:
        near = ", close to rounding to nearest" if damp >= 1 else ""
        what = f"GPTQ could not factorize its Gram matrix with options.damp and used more damping; {remedy}"
        warnings.append((what, f"{damp:.2g} instead of {options.damp:.2g}{near}"))
    return tuple(warnings)


def ranges(
    weight: Tensor, feedback: Feedback, stats: GroupStats, fmt: Format, options: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of `weight [out, in]`: from plain ranges, or with `clip` from those with the smallest error.

    `kwargs`: further arguments of `numerics.find_params`.
    """
    if options.clip:
        return ranges_of_least_error(weight, feedback.residual_weight, fmt, **kwargs)
    return find_params(weight, fmt, importance=stats.importance(), **kwargs)


class Gptq(Quantizer[Options]):
    """The scheme `gptq`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options
    PREPARED_BY: ClassVar[tuple[str, ...]] = ("damp", "actorder", "balance")

    @override
    def needs(self, options: Options) -> Needs:
        """The Gram matrix; mean magnitudes for smoothing."""
        return Needs(frozenset({"gram"} if options.smooth == "off" else {"gram", "absmean"}))

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: integer weights, 16-bit activations."""
        return weight_only(options.bits, options.group_size, options.symmetric)

    @override
    def smooth(
        self, weights: list[Tensor], stats: GroupStats, options: Options, scale_dtype: torch.dtype = torch.bfloat16
    ) -> Smoothing:
        """The scale `[in]` for the weights `[out_i, in]`; none if the options turn it off, or if 1 is best."""
        if options.smooth == "off":
            return Smoothing()
        awq_options = awq.Options(bits=options.bits, group_size=options.group_size, symmetric=options.symmetric)
        if options.smooth == "awq":
            return awq.SCHEME.smooth(weights, stats, awq_options, scale_dtype)
        scales = awq.candidates(weights, stats, awq_options)
        return smooth_for_feedback(weights, scales, stats, options, self.scheme(options).weights, scale_dtype)

    @override
    def prepare(
        self, weights: list[Tensor], stats: GroupStats, options: Options, factorization: Factorization | None = None
    ) -> Feedback:
        """Factorize the Gram matrix of the group's input, with more damping while it is not definite, or reuse the
        factorization of `smooth`. Raises ValueError if no damping suffices.

        With inputs divided by s the factor is `S^-1 R`.
        """
        if factorization is None:
            return _factorized(stats, options)
        # `factorization` is for inputs divided by its `scale`, `stats` for inputs divided by `stats.scale`.
        scale = factorization.scale
        return factorization.feedback.rescaled(1 / scale if stats.scale is None else stats.scale / scale)

    @override
    def quantize(
        self,
        weight: Tensor,
        stats: GroupStats,
        options: Options,
        scale_dtype: torch.dtype,
        prepared: Feedback | None = None,
    ) -> QTensor:
        """Round `weight [out, in]` column by column, with error feedback."""
        return self.quantize_group([weight], stats, options, scale_dtype, prepared)[0]

    @override
    def quantize_group(
        self,
        weights: list[Tensor],
        stats: GroupStats,
        options: Options,
        scale_dtype: torch.dtype,
        prepared: Feedback | None = None,
    ) -> list[QTensor]:
        """Round weights `[out_i, in]` column by column; rows are independent, so all weights are done at once."""
        feedback = self.prepare(weights, stats, options) if prepared is None else prepared
        fmt = self.scheme(options).weights
        params = [ranges(w, feedback, stats, fmt, options, scale_dtype=scale_dtype) for w in weights]
        return quantize_columns(weights, feedback, params, fmt, sweeps=options.sweeps)

    @override
    def sketch(
        self,
        weight: Tensor,
        stats: GroupStats,
        options: Options,
        scale_dtype: torch.dtype,
        prepared: Feedback | None = None,
    ) -> Tensor:
        """Estimate the error `q - w [out, in]` of `quantize` without rounding column by column.

        With the residual of each column to its target t, `r = Q(t) - t`, the errors d satisfy `d_i + sum_{j<i} d_j R_ji /
        R_ii = r_i`, one triangular system for all rows. The targets are unknown, but their residuals resemble those of the
        weights, which are used for r. This misses errors of targets beyond the range, of which there are many at 2 bits.
        """
        feedback = self.prepare([weight], stats, options) if prepared is None else prepared
        fmt = self.scheme(options).weights
        params = ranges(weight, feedback, stats, fmt, options, scale_dtype=scale_dtype)
        return propagated_error(residual(weight, *params, fmt).neg_(), feedback)

    @override
    def warnings(self, prepared: Feedback) -> Sequence[tuple[str, str]]:
        """Of a singular Gram matrix, and of more damping."""
        return prepared.warnings


SCHEME = Gptq()
