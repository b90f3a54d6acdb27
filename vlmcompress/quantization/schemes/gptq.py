"""GPTQ (arXiv 2210.17323): round the columns of a weight one after another, each time correcting those still to come.

With `H = X^T X` the output error of a row is `(w - q) H (w - q)^T`. Fixing the columns in order, the best correction
of column i for the errors made before it follows from a triangular factor `H = R R^T`, `R` upper triangular (the
Cholesky factor in reversed order), because then `(w - q) H (w - q)^T = ||(w - q) R||^2` and

    q_i = Q( w_i + sum_{j<i} (w_j - q_j) R_ji / R_ii )

makes the i-th term of that norm as small as rounding allows. It is GPTQ exactly, in the form of LDLQ (arXiv 2307.13304,
theorem 6) and Babai's nearest plane (arXiv 2507.18553), and needs neither the inverse of H nor its factor: one
Cholesky factorization per group instead of two and an inversion, shared by all layers with the same input.

Scales are found on the original weights: of plain ranges, or with `clip` of those whose squared error, each column
weighed by `R_ii^2` as the norm above weighs it, is least (`_ranges`). `smooth: awq` scales input channels by AWQ's
search first; `smooth: feedback` compares AWQ's candidates by that same norm instead, which knows what feedback will do.
Columns are rounded a block at a time (`_columns`), and `sweeps` of local search then change single codes of the block
(`_local_search`). `actorder: static` visits columns by falling diagonal of H while groups keep their place, so that the engine
needs no index; it is at least as accurate and costs nothing at serving time.

Cost: `in^3 / 3` once per group and `out * in^2` for each layer. Loses: it may overfit
few calibration tokens (hence the damping). Where there are fewer than inputs, H is singular: inputs that the tokens
don't tell apart share corrections as damping alone says. That and damping beyond `damp` (ten times more until H can be
factorized) are warned of; the larger the damping, the closer to rounding to nearest.

`balance` makes it modality-weighted: H is then the weighted sum of the modalities' Gram matrices (`statistics.balance`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import Format, QTensor, Scheme, find_params, residual, weight_only
from vlmcompress.numerics.statistics.balance import check_balance
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.schemes import awq
from vlmcompress.quantization.schemes._base import Needs, QuantizerOptions, Smoothing
from vlmcompress.quantization.schemes._columns import Feedback, propagated_error, quantize_columns
from vlmcompress.quantization.schemes._ranges import least_error

PREPARED_BY = ("damp", "actorder", "balance")
_FACTORED = 256  # columns that are factorized at a time


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`bits`, `group_size`, `symmetric` as in rtn; `damp`: share of the mean diagonal added to H; `block`: columns that are
    rounded, and searched, together; `actorder`: "static" or null; `smooth`: "off", "awq" for its channel scales first, or
    "feedback" for those of them that leave GPTQ least; `clip`: search the ranges, in `clip_grid` steps; `sweeps` of local
    search; `balance`: see `statistics.balance`."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    damp: float = 0.01
    block: int = 256
    actorder: str | None = "static"
    smooth: Any = "off"  # YAML reads a bare `off` as False
    clip: bool = False
    clip_grid: int = 20
    sweeps: int = 0
    balance: Any = "off"

    def __post_init__(self) -> None:
        scheme(self)
        object.__setattr__(self, "smooth", "off" if self.smooth is False else self.smooth)
        if self.smooth not in ("off", "awq", "feedback"):
            raise ValueError(f"smooth must be 'off', 'awq' or 'feedback', got {self.smooth!r}")
        if not isinstance(self.clip, bool):
            raise ValueError(f"clip must be true or false, got {self.clip!r}")
        for name, least in (("clip_grid", 3), ("sweeps", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        object.__setattr__(self, "balance", check_balance(self.balance))
        if isinstance(self.damp, bool) or not isinstance(self.damp, int | float) or not 0 < self.damp <= 1:
            raise ValueError(f"damp must be a number above 0 and at most 1, got {self.damp!r}")
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"block must be a positive whole number, got {self.block!r}")
        if self.actorder not in ("static", None):
            raise ValueError(f"actorder must be 'static' or null, got {self.actorder!r}")


def needs(options: Options) -> Needs:
    """The Gram matrix; mean magnitudes for smoothing."""
    return Needs(frozenset({"gram"} if options.smooth == "off" else {"gram", "absmean"}))


def scheme(options: Options) -> Scheme:
    """Number formats: integer weights, 16-bit activations."""
    return weight_only(options.bits, options.group_size, options.symmetric)


def smooth(
    weights: list[Tensor], stats: GroupStats, options: Options, scale_dtype: torch.dtype = torch.bfloat16
) -> Smoothing:
    """The scale `[in]` for the weights `[out_i, in]` that share an input; none where none is asked for, or none helps."""
    if options.smooth == "off":
        return Smoothing()
    awq_options = awq.Options(bits=options.bits, group_size=options.group_size, symmetric=options.symmetric)
    if options.smooth == "awq":
        return awq.smooth(weights, stats, awq_options, scale_dtype)
    scales = awq.candidates(weights, stats, awq_options)
    return smooth_for_feedback(weights, scales, stats, options, scheme(options).weights, scale_dtype)


@dataclass(frozen=True)
class Factor:
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
    """Choose from `scales`, AWQ's candidates, each `[in]`, the one after which error feedback leaves the smallest error of
    the weights `[out_i, in]`; none where 1 does.

    With inputs divided by s the factor of H is `S^-1 R`, so column j counts `residues_j / s_j^2` there, in the same order
    of visits. Squared errors of rounding `W s` to nearest, so weighed, need no product with a matrix: this costs less
    than AWQ's own search, which does not know of feedback.

    Damping and the order of visits should be those of the smoothed inputs, whose scale is still unknown here: those of inputs
    divided by the middle one of AWQ's candidates with weights take their place. `prepare` continues from that factor.
    """
    middle = scales[len(scales) * 3 // 4]  # the last half of the candidates are those with weights
    feedback = _factorized(stats.rescaled(middle), options)
    residual_weight = feedback.residual_weight * middle.square()  # R_jj^2 of inputs that are divided by nothing

    def left(rows: Tensor, tried: Tensor) -> Tensor:
        # With H_s = S^-1 H S^-1 the factor is S^-1 R, and the error of W s is s D: (s_j D_j)^2 R_jj^2 / s_j^2 = D_j^2 R_jj^2.
        d = awq.errors(rows, tried, residual_weight, fmt, scale_dtype, fmt.max_codes[0])  # D [k, rows, in]
        return (d.square_() @ residual_weight).sum(1, dtype=torch.float64)

    divided = middle if stats.scale is None else middle * stats.scale
    return Smoothing(awq.best_scale(weights, scales, left), Factor(feedback, divided))


def prepare(weights: list[Tensor], stats: GroupStats, options: Options, factor: Factor | None = None) -> Feedback:
    """Factorize the Gram matrix of the group's input, damped more while it is not definite, unless `smooth` did so.

    With inputs divided by s the factor is `S^-1 R`.
    """
    if factor is None:
        return _factorized(stats, options)
    # The factor is of inputs over `factor.scale`; those of `stats` are over `stats.scale`.
    return factor.feedback.rescaled(1 / factor.scale if stats.scale is None else stats.scale / factor.scale)


def _factorized(stats: GroupStats, options: Options) -> Feedback:
    """Factorize the Gram matrix of `stats`."""
    damp = options.damp
    for _ in range(8):
        h = (
            stats.gram()
        )  # H = X^T X [in, in] float32; the paper's H is twice that, which changes no quotient R_ji / R_ii
        diagonal = h.diagonal().clone()
        dead = diagonal == 0  # inputs that are always zero: with any positive diagonal their weights are just rounded
        diagonal[dead] = 1.0 if dead.all() else diagonal[~dead].mean()
        # The paper adds 1% of the mean diagonal (its step 3, Cholesky reformulation): where inputs depend on each other H is
        # singular.
        diagonal += damp * diagonal.mean()
        order = torch.arange(len(h), device=h.device)
        if options.actorder == "static":
            # "act-order" of the authors' code: columns of large inputs first, while many others can still make up for them.
            order = diagonal.argsort(descending=True, stable=True)
        h = reordered(h, order)
        h.diagonal().copy_(diagonal[order])
        if factorize(h):
            warnings = _warnings(stats.tokens, int((~dead).sum()), damp, options)
            # `h` holds R^T now. Row i over its pivot R_ii is what column i is corrected by: R_ji / R_ii for j < i.
            pivots, residual_weight = h.diagonal().clone(), torch.zeros_like(diagonal)
            residual_weight[order] = pivots.square()
            return Feedback(order, h.div_(pivots[:, None]), residual_weight.masked_fill_(dead, 0), pivots, warnings)
        damp *= 10
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

    By blocks from the last on, as R is Cholesky's factor of `h` with rows and columns reversed. In place, as `h` may be the
    largest tensor of the run. Returns whether `h` is definite.
    """
    failed = []  # the device is asked once, after the last block
    for a in reversed(range(0, len(h), _FACTORED)):
        b = min(a + _FACTORED, len(h))
        # [256, b]: rows a to b of what the blocks after them leave, H - R_after R_after^T.
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
    warnings = []
    if tokens < inputs:
        what = "GPTQ saw fewer tokens than a layer has inputs: its Gram matrix is singular, and damped; take more --samples"
        warnings.append((what, f"{tokens} tokens, {inputs} inputs"))
    if damp > options.damp:
        near = ", close to rounding to nearest" if damp >= 1 else ""
        what = "GPTQ could not factorize its Gram matrix with options.damp and damped it more; take more --samples"
        warnings.append((what, f"{damp:.2g} instead of {options.damp:.2g}{near}"))
    return tuple(warnings)


def quantize(
    weight: Tensor, stats: GroupStats, options: Options, scale_dtype: torch.dtype, prepared: Feedback | None = None
) -> QTensor:
    """Round `weight [out, in]` column by column, feeding errors forward."""
    return quantize_group([weight], stats, options, scale_dtype, prepared)[0]


def quantize_group(
    weights: list[Tensor],
    stats: GroupStats,
    options: Options,
    scale_dtype: torch.dtype,
    prepared: Feedback | None = None,
) -> list[QTensor]:
    """Round weights `[out_i, in]` column by column; rows are independent, so all weights are done at once."""
    feedback = prepare(weights, stats, options) if prepared is None else prepared
    fmt = scheme(options).weights
    params = [ranges(w, feedback, stats, fmt, options, scale_dtype=scale_dtype) for w in weights]
    return quantize_columns(weights, feedback, params, fmt, options.block, options.sweeps)


def ranges(
    weight: Tensor, feedback: Feedback, stats: GroupStats, fmt: Format, options: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of `weight [out, in]`: of its plain ranges, or with `clip` of those that err least.

    `kwargs`: further arguments of `numerics.find_params`.
    """
    if options.clip:
        return least_error(weight, feedback.residual_weight, fmt, options.clip_grid, **kwargs)
    return find_params(weight, fmt, importance=stats.importance(), **kwargs)


def sketch(
    weight: Tensor, stats: GroupStats, options: Options, scale_dtype: torch.dtype, prepared: Feedback | None = None
) -> Tensor:
    """Estimate the error `q - w [out, in]` that `quantize` makes, without visiting columns one by one.

    With the residual of each column to its target, `r = Q(t) - t`, the errors d fulfil `d_i + sum_{j<i} d_j R_ji / R_ii
    = r_i`, one triangular system for all rows. The targets are not known, but their residuals are like those of the
    weights themselves, which are put in for r. Rounding errors beyond the range are then missed, and at 2 bits there
    are many.
    """
    feedback = prepare([weight], stats, options) if prepared is None else prepared
    fmt = scheme(options).weights
    params = ranges(weight, feedback, stats, fmt, options, scale_dtype=scale_dtype)
    return propagated_error(residual(weight, *params, fmt).neg_(), feedback)
