"""AWQ (arXiv 2306.00978): scale up the input channels that matter before rounding weights, found by search.

Multiplying a weight's column by `s_j` and dividing the input by it leaves the product unchanged, but reduces the effect of
that column's rounding error as long as the group's step does not grow. The scales come from a one-parameter family over the
mean magnitudes of inputs and from one that includes the weights' magnitudes relative to their group,

    s = mean|X|^a    and    s = mean|X|^a / mean|W|^(1-a),    normalized by sqrt(max s * min s),      a in [0, 1]

and the paper takes the scale with the smallest output error (eq. 4). Re-running the model for each candidate is slow, but the
error needs only the Gram matrix `G = X^T X`, accumulated once:

    L(s) = sum over the group's layers of tr(D G D^T),      D = Q(W s) / s - W

which is a sum over rows, so candidates are compared on some 256 evenly spaced rows of the group. `s = 1` (a = 0) is among them:
the result is no worse than rounding to nearest on that objective.

`clip` then searches, for each row and group of columns, a smaller range whose finer step gains more than clipping loses, on
the group's own block of G; a row keeps its clipped ranges only if its error under all of G falls.

`balance` weights the modalities in mean|X|, in L and in the clip search: the Gram form of MBQ (arXiv 2412.19509).

Cost: `grid * 256 * in^2` multiply-adds per group and family and `out * in^2` per layer. Loses: the scales have
only one parameter, and there is no error feedback (as in gptq).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.numerics import (
    Format,
    QTensor,
    Scheme,
    find_params,
    find_ranges,
    quantize_with,
    residual,
    round_to_nearest,
    row_chunks,
    scale_from_range,
    weight_only,
)
from vlmcompress.numerics.statistics.balance import require_balance
from vlmcompress.numerics.statistics.inputs import GroupStats, quadratic
from vlmcompress.quantization.schemes._base import Needs, Quantizer, QuantizerOptions, Smoothing

SMALLEST_RATIO = 0.5  # smallest share of the range that clipping tries, as in the paper's code
_STEPS = 10  # ranges that clipping tries
_SAMPLE = 256  # rows on which scales are compared
# (eighths of the rows, number of scales that stay after them)
_ROUNDS = (((3,), 15), ((1, 5), 7), ((0, 2, 4, 6, 7), 1))
_ROWS = 512  # rows whose ranges are searched at a time


@dataclass(frozen=True)
class Options(QuantizerOptions):
    """`bits`, `group_size`, `symmetric` as in rtn; `grid`: candidate scales of each family;
    `clip`: search clipped ranges; `balance`: see `vlmcompress.numerics.statistics.balance`."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    grid: int = 20
    clip: bool = True
    balance: Any = "off"

    def __post_init__(self) -> None:
        SCHEME.scheme(self)
        object.__setattr__(self, "balance", require_balance(self.balance))
        if type(self.grid) is not int or self.grid < 3:
            raise ValueError(f"grid must be a whole number of at least 3, got {self.grid!r}")
        if not isinstance(self.clip, bool):
            raise ValueError(f"clip must be true or false, got {self.clip!r}")


def scale_of_least_error(
    weights: list[Tensor],
    scales: list[Tensor],
    gram: Tensor,
    fmt: Format,
    scale_dtype: torch.dtype,
    max_code: float | None = None,
) -> Tensor | None:
    """Choose from `scales`, each `[in]`, the one with the smallest error for the weights `[out_i, in]`; None if 1 is better.

    `max_code`: as in `numerics.find_params`.
    """
    return best_scale(weights, scales, lambda rows, tried: _losses(rows, tried, gram, fmt, scale_dtype, max_code))


Losses = Callable[[Tensor, Tensor], Tensor]
"""Function of rows of weights `[rows, in]` and scales `[k, in]` that returns each scale's loss on these rows, float64
`[k]`."""


def best_scale(weights: list[Tensor], scales: list[Tensor], losses: Losses) -> Tensor | None:
    """Choose by successive halving from `scales`, each `[in]`, the one with the smallest loss on the weights `[out_i, in]`;
    None if 1 has a smaller one."""
    rows = torch.cat(sample(weights))
    tried = torch.stack([torch.ones_like(scales[0]), *scales])
    # Errors are sums over rows. The first eighth of the rows eliminates the worst half of the scales, and only a few are left
    # for the last rows; losses are summed over all rows so far, in float64.
    rounds = _ROUNDS if len(rows) > _SAMPLE // 2 else ((range(8), 1),)
    total = torch.zeros(len(tried), dtype=torch.float64, device=rows.device)
    for eighths, count in rounds:
        some = torch.cat([rows[k::8] for k in eighths])
        total += torch.cat([losses(some, scales) for scales in tried.split(max(1, _SAMPLE // len(some)))])
        rivals = total[1:].topk(min(count, len(total) - 1), largest=False).indices.sort().values + 1
        ahead = torch.cat([rivals.new_zeros(1), rivals])  # the scale 1 always stays
        tried, total = tried[ahead], total[ahead]
    return tried[1] if total[1] < total[0] else None


def sample(weights: list[Tensor]) -> list[Tensor]:
    """Take evenly spaced rows of all weights, about `_SAMPLE` in total, in float32."""
    step = max(1, round(sum(map(len, weights)) / _SAMPLE))
    return [weight[step // 2 :: step].float() for weight in weights]


def candidates(weights: list[Tensor], stats: GroupStats, options: Options) -> list[Tensor]:
    """The scales `[in]` to try besides 1, spread evenly over the exponent: the published family, then AutoAWQ's."""
    # Eq. (5): s = s_X^a, where s_X is the mean magnitude of each input channel; a = 0 is the scale 1, which needs no search.
    x, points = stats.absmean(), options.grid - 1
    scales = [x.pow((k + 1) / points) for k in range(points)]
    # `duo_scaling` of AutoAWQ and llm-compressor, which the paper does not have: large weights need less scale.
    w = _relative_magnitude(weights, SCHEME.scheme(options).weights)
    scales += [x.pow(a) / (w.pow(1 - a) + 1e-4) for a in torch.linspace(0, 1, points).tolist()]
    scales = [s.clamp(min=1e-4) for s in scales]
    # As in the authors' code: the largest and the smallest scale become reciprocal, so that weights keep their magnitude.
    scales = [s / (s.max() * s.min()).sqrt() for s in scales]
    return [torch.where(s.isfinite() & (s > 0), s, 1.0) for s in scales]


def clipped(weight: Tensor, gram: Tensor, fmt: Format, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of `weight [out, in]`, clipped in rows where that reduces the error under `gram`.

    `kwargs`: further arguments of `numerics.scale_from_range`.
    """
    params = [_clipped(rows.float(), gram, fmt, kwargs) for rows in weight.split(_ROWS)]
    zero = None if fmt.symmetric else torch.cat([zero for _, zero in params if zero is not None])
    return torch.cat([scale for scale, _ in params]), zero


def _clipped(w: Tensor, gram: Tensor, fmt: Format, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Compute `clipped` for some rows."""
    low, high = find_ranges(w, fmt, gram.diagonal())

    def tried(ratio: float | Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        scale, zero = scale_from_range(w, low * ratio, high * ratio, fmt, importance=gram.diagonal(), **kwargs)
        return scale, zero, quadratic(residual(w, scale, zero, fmt), gram)

    # Ranges that are best for each group alone may be worse together: the whole row decides, under all of G.
    scale, zero, error = tried(1.0)
    clipped_scale, clipped_zero, less = tried(_best_ratio(w, (low, high), gram, fmt, kwargs))
    better = (less < error)[:, None]
    scale = torch.where(better, clipped_scale, scale)
    return scale, None if zero is None or clipped_zero is None else torch.where(better, clipped_zero, zero)


def _losses(
    w: Tensor, scales: Tensor, gram: Tensor, fmt: Format, scale_dtype: torch.dtype, max_code: float | None = None
) -> Tensor:
    """Losses `tr(D G D^T)`, `D = Q(W s) / s - W`, for each of `scales [k, in]`: float64 `[k]`; `w [out, in]` float32."""
    # Eq. (4), ||Q(W s) (X / s) - W X||^2, as a trace with G = X^T X: D = Q(W s) / s - W is the change of W itself.
    d = errors(w, scales, gram.diagonal(), fmt, scale_dtype, max_code)
    return quadratic(d.flatten(0, 1), gram).view(len(scales), -1).sum(1, dtype=torch.float64)


def errors(
    w: Tensor, scales: Tensor, importance: Tensor, fmt: Format, scale_dtype: torch.dtype, max_code: float | None = None
) -> Tensor:
    """Rounding errors of `w [out, in]`, `Q(W s) / s - W`, for each of `scales [k, in]`: `[k, out, in]`.

    `importance [in]`: as in `numerics.find_params`, for inputs not yet divided by s; `max_code`: as there.
    """
    s = scales[:, None]
    # For inputs divided by s the Gram matrix has the diagonal G_jj / s_j^2. With zero points only its zeros matter.
    if fmt.symmetric:
        importance = (importance / s.square()).expand(-1, len(w), -1).flatten(0, 1)
    scaled = (w * s).flatten(0, 1)
    params = find_params(scaled, fmt, scale_dtype=scale_dtype, importance=importance, max_code=max_code)
    return residual(scaled, *params, fmt).view(-1, *w.shape).div_(s)


def _relative_magnitude(weights: list[Tensor], fmt: Format) -> Tensor:
    """The mean over all rows of `|W|` relative to the largest of its group: `[in]`, in 0 to 1."""
    total = torch.zeros(weights[0].shape[1], device=weights[0].device)
    for weight in weights:
        for rows in row_chunks(weight):
            groups = weight[rows].float().abs().unflatten(1, (fmt.n_groups(weight.shape[1]), -1))
            total += groups.div_(groups.amax(-1, keepdim=True).add_(1e-6)).sum(0).flatten()
    return total / sum(map(len, weights))


def _best_ratio(
    w: Tensor, ranges: tuple[Tensor, Tensor], gram: Tensor, fmt: Format, kwargs: Mapping[str, Any]
) -> Tensor:
    """The share `[out, n_groups]` of the range, for each row and group, with the smallest error under the group's block of
    G."""
    n = fmt.n_groups(w.shape[1])
    size = w.shape[1] // n
    blocks = torch.stack([gram[k : k + size, k : k + size] for k in range(0, n * size, size)])  # [n, size, size]
    low, high = ranges
    best = torch.ones_like(low)
    least = torch.full_like(best, torch.inf)
    for k in range(_STEPS):
        ratio = 1 - k * (1 - SMALLEST_RATIO) / _STEPS
        scale, zero = scale_from_range(w, low * ratio, high * ratio, fmt, importance=gram.diagonal(), **kwargs)
        errors = []
        for rows in row_chunks(w):  # d_g G_gg d_g^T for every group g of a row, as if the others were not rounded
            d = residual(w[rows], scale[rows], None if zero is None else zero[rows], fmt)
            d = d.view(len(d), n, size).transpose(0, 1)  # [n_groups, rows, group]
            errors.append(torch.bmm(d, blocks).mul_(d).sum(-1).T)
        error = torch.cat(errors)
        best = torch.where(error < least, ratio, best)  # ties go to the widest range, which generalizes best
        least = torch.minimum(error, least)
    return best


class Awq(Quantizer[Options]):
    """The scheme `awq`; its method is the module's text."""

    OPTIONS: ClassVar[type[QuantizerOptions]] = Options

    @override
    def needs(self, options: Options) -> Needs:
        """The Gram matrix and mean magnitudes."""
        return Needs(frozenset({"gram", "absmean"}))

    @override
    def scheme(self, options: Options) -> Scheme:
        """Number formats: integer weights, 16-bit activations."""
        return weight_only(options.bits, options.group_size, options.symmetric)

    @override
    def smooth(
        self, weights: list[Tensor], stats: GroupStats, options: Options, scale_dtype: torch.dtype = torch.bfloat16
    ) -> Smoothing:
        """The best scale `[in]` for the weights `[out_i, in]` that share an input; none if no scale beats 1."""
        scales, fmt = candidates(weights, stats, options), self.scheme(options).weights
        return Smoothing(scale_of_least_error(weights, scales, stats.gram(), fmt, scale_dtype))

    @override
    def prepare(
        self, weights: list[Tensor], stats: GroupStats, options: Options, factorization: None = None
    ) -> Tensor | None:
        """The Gram matrix `[in, in]` of the smoothed input, for the clip search."""
        return stats.gram() if options.clip else None

    @override
    def quantize(
        self,
        weight: Tensor,
        stats: GroupStats,
        options: Options,
        scale_dtype: torch.dtype,
        prepared: Tensor | None = None,
    ) -> QTensor:
        """Round the smoothed `weight [out, in]` to nearest in clipped or full ranges; `stats`: of the smoothed input."""
        fmt = self.scheme(options).weights
        if not options.clip:
            return round_to_nearest(weight, fmt, scale_dtype=scale_dtype, importance=stats.importance())
        gram = stats.gram() if prepared is None else prepared
        return quantize_with(weight, *clipped(weight, gram, fmt, scale_dtype=scale_dtype), fmt)


SCHEME = Awq()
