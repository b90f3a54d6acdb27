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
`sweeps` of local search change single codes and scales once all are known (`_coordinate_descent`). `actorder: static` visits
columns by falling diagonal of H while groups keep their place, so that the engine needs no index; it is at least as
accurate and costs nothing at serving time.

Cost: `in^3 / 3` once per group and `out * in^2` for each layer. Loses: it may overfit
few calibration tokens (hence the damping). Where there are fewer than inputs, H is singular: inputs that the tokens
don't tell apart share corrections as damping alone says. That and damping beyond `damp` (ten times more until H can be
factorized) are warned of; the larger the damping, the closer to rounding to nearest.

`balance` makes it modality-weighted: H is then the weighted sum of the modalities' Gram matrices (`statistics.balance`).
`tokens: vlmq` weighs single tokens instead, in attention's layers (`calibration.token_weights`): H is then the Gram matrix of
rows multiplied by their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import Format, QTensor, Scheme, encode, find_params, remainder, residual, weight_only
from vlmcompress.quantizers import awq
from vlmcompress.quantizers._base import Needs, QuantizerOptions, Search
from vlmcompress.quantizers._cholesky import factorize, reordered
from vlmcompress.quantizers._coordinate_descent import descend
from vlmcompress.quantizers._fused import kernels
from vlmcompress.quantizers._ranges import least_error
from vlmcompress.statistics.balance import check_balance
from vlmcompress.statistics.inputs import GroupStats

PREPARED_BY = ("damp", "actorder", "balance")
_FAR = 512  # columns corrected at a time for the errors of all before; larger products are faster
_STRIP = 16  # columns within which errors are fed back one by one


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`bits`, `group_size`, `symmetric` as in rtn; `damp`: share of the mean diagonal added to H, with `smooth: feedback` in
    proportion to the root of each input's own; `block`: columns per update; `actorder`: "static" or null; `smooth`: "off",
    "awq" for its channel scales first, or "feedback" for those of them that leave GPTQ least; `clip`: search the ranges, in
    `clip_grid` steps; `sweeps` of local search afterwards, with `refit` of scales before it; `balance`: see
    `statistics.balance`; `tokens`: "off" or "vlmq"."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    damp: float = 0.01
    block: int = 128
    actorder: str | None = "static"
    smooth: Any = "off"  # YAML reads a bare `off` as False
    clip: bool = False
    clip_grid: int = 20
    sweeps: int = 0
    refit: bool = True
    balance: Any = "off"
    tokens: Any = "off"

    def __post_init__(self) -> None:
        scheme(self)
        for name in ("smooth", "tokens"):
            object.__setattr__(self, name, "off" if getattr(self, name) is False else getattr(self, name))
        check_steps(self)
        if self.tokens not in ("off", "vlmq"):
            raise ValueError(f"tokens must be 'off' or 'vlmq', got {self.tokens!r}")
        object.__setattr__(self, "balance", check_balance(self.balance))
        if self.tokens != "off" and self.balance != "off":
            raise ValueError("tokens 'vlmq' weighs every token, so balance must be 'off'")
        if isinstance(self.damp, bool) or not isinstance(self.damp, int | float) or not 0 < self.damp <= 1:
            raise ValueError(f"damp must be a number above 0 and at most 1, got {self.damp!r}")
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"block must be a positive whole number, got {self.block!r}")
        if self.actorder not in ("static", None):
            raise ValueError(f"actorder must be 'static' or null, got {self.actorder!r}")


def check_steps(options: Any) -> None:
    """Check the options of the steps around feedback, which other schemes have as well. Raises ValueError."""
    if getattr(options, "smooth", "off") not in ("off", "awq", "feedback"):
        raise ValueError(f"smooth must be 'off', 'awq' or 'feedback', got {options.smooth!r}")
    for name in ("clip", "refit"):
        if not isinstance(getattr(options, name), bool):
            raise ValueError(f"{name} must be true or false, got {getattr(options, name)!r}")
    for name, least in (("clip_grid", 3), ("sweeps", 0)):
        value = getattr(options, name)
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


@dataclass(frozen=True)
class Feedback:
    """Error feedback of a group.

    Attributes:
        order: `[in]`, the order in which columns are rounded.
        matrix: `[in, in]` with `R_ji / R_ii` at row i, column j < i; the rest is not read.
        residues: `[in]`, `R_ii^2`: weight of column i's rounding error after optimal compensation by later columns.
        pivots: `[in]`, `R_ii` in the order of `order`.
        warnings: defects of the Gram matrix, with details.
    """

    order: Tensor
    matrix: Tensor
    residues: Tensor
    pivots: Tensor
    warnings: tuple[tuple[str, str], ...] = ()

    def rescaled(self, s: Tensor) -> Feedback:
        """The feedback of inputs divided by `s [in]`, in the same order of visits; takes over the matrix."""
        visited = s[self.order]
        matrix = self.matrix.mul_(visited[:, None]).div_(visited)
        return replace(self, matrix=matrix, residues=self.residues / s.square(), pivots=self.pivots / visited)


def needs(options: Options) -> Needs:
    """The Gram matrix; mean magnitudes for smoothing; weights of tokens where the options ask for them."""
    searches: frozenset[Search] = frozenset() if options.tokens == "off" else frozenset({"token_weights"})
    return Needs(frozenset({"gram"} if options.smooth == "off" else {"gram", "absmean"}), searches=searches)


def scheme(options: Options) -> Scheme:
    """Number formats: integer weights, 16-bit activations."""
    return weight_only(options.bits, options.group_size, options.symmetric)


def smooth(
    weights: list[Tensor], stats: GroupStats, options: Options, scale_dtype: torch.dtype = torch.bfloat16
) -> Tensor | None:
    """The scale `[in]` for the weights `[out_i, in]` that share an input; None where none is asked for, or none helps."""
    if options.smooth == "off":
        return None
    awq_options = awq.Options(bits=options.bits, group_size=options.group_size, symmetric=options.symmetric)
    if options.smooth == "awq":
        return awq.smooth(weights, stats, awq_options, scale_dtype)
    scales = awq.candidates(weights, stats, awq_options)
    return least_left(weights, scales, residues(stats, options), scheme(options).weights, scale_dtype)


def residues(stats: GroupStats, options: Options) -> Tensor:
    """`Feedback.residues [in]` of inputs that no scale was found for yet; hands their factor on to `prepare`."""
    feedback = stats.handed_on[_key(options)] = _factorized(stats.unscaled(), options)
    return feedback.residues if stats.scale is None else feedback.residues / stats.scale.square()


def least_left(
    weights: list[Tensor],
    scales: list[Tensor],
    residues: Tensor,
    fmt: Format,
    scale_dtype: torch.dtype,
) -> Tensor | None:
    """Choose from `scales`, each `[in]`, the one after which feedback leaves least for the weights `[out_i, in]`.

    With inputs divided by s the factor of H is `S^-1 R`, so that column j counts `residues_j / s_j^2` there, in the same
    order of visits. Squared errors of rounding `W s` to nearest, so weighed, need no product with a matrix: this costs less
    than AWQ's own search, which does not know of feedback. None: 1 leaves least.
    """
    rows = torch.cat(awq.sample(weights))
    best, least = None, torch.inf
    for s in (None, *scales):
        scaled, counts = (rows, residues) if s is None else (rows * s, residues / s.square())
        params = find_params(scaled, fmt, scale_dtype=scale_dtype, importance=counts, max_code=fmt.max_codes[0])
        left = float((residual(scaled, *params, fmt).square_() @ counts).sum(dtype=torch.float64))
        if left < least:
            best, least = s, left
    return best


def prepare(weights: list[Tensor], stats: GroupStats, options: Options) -> Feedback:
    """Factorize the Gram matrix of the group's input; damped more while it is not definite.

    With `smooth: feedback` that of the inputs before smoothing, which `smooth` has factorized already: with inputs divided by s
    its factor is `S^-1 R`. Columns are then visited in the order of those inputs.
    """
    if options.smooth != "feedback":
        return _factorized(stats, options)
    feedback = stats.handed_on.pop(_key(options), None) or _factorized(stats.unscaled(), options)
    return feedback if stats.scale is None else feedback.rescaled(stats.scale)


def _key(options: Options) -> tuple[Any, ...]:
    return "feedback", options.damp, options.actorder


def _factorized(stats: GroupStats, options: Options) -> Feedback:
    """Factorize the Gram matrix of `stats`."""
    damp = options.damp
    for _ in range(8):
        h = stats.gram()
        diagonal = h.diagonal().clone()
        dead = diagonal == 0  # inputs that are always zero: with any positive diagonal their weights are just rounded
        diagonal[dead] = 1.0 if dead.all() else diagonal[~dead].mean()
        diagonal += _damping(diagonal, damp, options)
        order = torch.arange(len(h), device=h.device)
        if options.actorder == "static":
            order = diagonal.argsort(descending=True, stable=True)
        h = reordered(h, order)
        h.diagonal().copy_(diagonal[order])
        if factorize(h):
            warnings = _warnings(stats.tokens, int((~dead).sum()), damp, options)
            pivots, residues = h.diagonal().clone(), torch.zeros_like(diagonal)
            residues[order] = pivots.square()
            return Feedback(order, h.div_(pivots[:, None]), residues.masked_fill_(dead, 0), pivots, warnings)
        damp *= 10
    raise ValueError("the Gram matrix of the calibration statistics cannot be factorized; collect them again")


def _damping(diagonal: Tensor, damp: float, options: Any) -> Tensor:
    """What is added to the `diagonal [in]` of a Gram matrix: alike for all inputs, as in the paper.

    With `smooth: feedback`, where s is not known yet, in proportion to an input's size: about what damping alike adds to inputs
    divided by scales of AWQ's family, which go with a power of that size between 0 and 1.
    """
    if options.smooth != "feedback":
        return damp * diagonal.mean()
    size = diagonal.sqrt()
    return damp * size.mean() * size


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
    return searched(weights, quantize_columns(weights, feedback, params, fmt, options.block), stats, options)


def searched(weights: list[Tensor], quantized: list[QTensor], stats: GroupStats, options: Any) -> list[QTensor]:
    """The `quantized` weights `[out_i, in]` after the local search that the options ask for, if any.

    It looks at the Gram matrix as it is damped for feedback, so that what the tokens hardly tell apart stays near the weights.
    """
    if not options.sweeps:
        return quantized
    gram = stats.gram().clone()
    gram.diagonal().add_(_damping(gram.diagonal(), options.damp, options))
    return descend(weights, quantized, gram, options.sweeps, options.refit)


def ranges(
    weight: Tensor, feedback: Feedback, stats: GroupStats, fmt: Format, options: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of `weight [out, in]`: of its plain ranges, or with `clip` of those that err least.

    `kwargs`: further arguments of `numerics.find_params`.
    """
    if options.clip:
        return least_error(weight, feedback.residues, fmt, options.clip_grid, **kwargs)
    return find_params(weight, fmt, importance=stats.importance(), **kwargs)


def quantize_columns(
    weights: Sequence[Tensor],
    feedback: Feedback,
    params: Sequence[tuple[Tensor, Tensor | None]],
    fmt: Format,
    block: int = 128,
    global_scale: Tensor | None = None,
) -> list[QTensor]:
    """Round weights `[out_i, in]` column by column, with `feedback` of their group's input.

    `params`: the scale and zero point of each, as of `numerics.find_params`; `global_scale`: theirs, of NVFP4.
    """
    scales = torch.cat([scale for scale, _ in params]).float().T.contiguous()  # [n_groups, out]
    zeros = (
        None if fmt.symmetric else torch.cat([zero for _, zero in params if zero is not None]).float().T.contiguous()
    )
    together = weights[0].float() if len(weights) == 1 else torch.cat([w.float() for w in weights])
    q = _quantize_columns(together, feedback, scales, zeros, fmt, block).split([len(w) for w in weights])
    return [QTensor.of(codes, scale, zero, fmt, global_scale) for codes, (scale, zero) in zip(q, params, strict=True)]


def _quantize_columns(
    weight: Tensor, feedback: Feedback, scales: Tensor, zeros: Tensor | None, fmt: Format, block: int
) -> Tensor:
    """Codes `[out, in]` of `weight [out, in]`; `scales` and `zeros` are `[n_groups, out]`.

    Works on W^T, where columns are contiguous. The sums over earlier errors are products of matrices, large ones for errors
    far back, then by blocks and by strips; only within a strip (on a GPU a block) they are taken column by column.
    """
    # [in, out] in the order in which columns are rounded; each row of it becomes the errors of its column
    rows = weight.T.contiguous().index_select(0, feedback.order)
    codes, matrix = torch.empty_like(rows, dtype=fmt.dtype), feedback.matrix
    groups = (feedback.order // (len(rows) if fmt.group < 0 else fmt.group)).int()
    fused = kernels(rows.device, fmt)
    visit = fused.visit if fused else _visit
    for first, end in _spans(0, len(rows), max(_FAR, block)):
        targets = rows[first:end].addmm(matrix[first:end, :first], rows[:first])
        for a, b in _spans(first, end, block):
            block_targets = targets[a - first : b - first].addmm_(matrix[a:b, first:a], rows[first:a])
            visit(block_targets, rows[a:b], matrix[a:b, a:b], scales, zeros, groups[a:b], fmt)
        codes[first:end] = targets
    return codes.index_select(0, feedback.order.argsort()).T.contiguous()


def _visit(
    targets: Tensor, rows: Tensor, matrix: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor, fmt: Format
) -> None:
    """Round a block of columns one after another.

    Args:
        targets: `[columns, out]` what they are rounded from but for each other's errors; becomes their codes.
        rows: `[columns, out]` their weights; becomes their errors.
        matrix: `[columns, columns]` of `Feedback.matrix`.
        scales, zeros: `[n_groups, out]`; `groups`: `[columns]`, int32, which of them a column has.
    """
    s = scales.unbind()
    z = [None] * len(s) if zeros is None else zeros.unbind()
    places = groups.tolist()
    for c, d in _spans(0, len(rows), _STRIP):
        strip, columns = targets[c:d].addmm_(matrix[c:d, :c], rows[:c]), rows[c:d]
        earlier, errors = matrix[c:d, c:d].tril(-1), columns.T  # 0 for columns whose errors are not known yet
        for g, target, row, factors in zip(
            places[c:d], strip.unbind(), columns.unbind(), earlier.unbind(), strict=True
        ):
            encode(target.addmv_(errors, factors), s[g], z[g], fmt, out=target)
            remainder(row, target, s[g], z[g], out=row)


def _spans(first: int, end: int, step: int) -> list[tuple[int, int]]:
    return [(a, min(a + step, end)) for a in range(first, end, step)]


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


def propagated_error(residual: Tensor, feedback: Feedback) -> Tensor:
    """Estimate the error `[out, in]` that is left with `feedback`, from that of rounding to nearest; see `sketch`."""
    fed = torch.linalg.solve_triangular(feedback.matrix, residual[:, feedback.order].T, upper=False, unitriangular=True)
    error = torch.empty_like(residual)
    error[:, feedback.order] = fed.T
    return error
