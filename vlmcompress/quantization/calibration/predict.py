"""Predict the error of a group of linear layers under a method, from statistics and a few rows of its weights.

An output error `D = X dW^T` changes the loss, to second order and with the diagonal Fisher matrix for the Hessian, by

    dL = 1/2 sum_m f_m ||X_m dW^T||^2 = 1/2 sum_m f_m tr(dW G_m dW^T),      f_m = mean over modality m of (dL/dY)^2

in nats where `f` belongs to the loss itself. Measured one group at a time on demo-llava (`compare_prediction.py` of commit
5ff363c), it ranks groups like the divergence of held-out answers (Spearman 0.77 and 0.85 at 4 and 3 bits; 0.26 at 2, where
changes are not small), but is four to fourteen times too small, because the model is confident in the answers whose gradients
are used. So it is meant for ranking. On a real language model, which is less confident, its size is right as well: for
SmolLM2-135M's first two blocks at 2 and 3 bits by GPTQ, 12 of 15 groups diverge within a quarter of the prediction, and over
all 120 groups at 3 bits it sums to 1.6 nats while the model diverges by 1.9.

Without gradients the error is the relative error of the layers' outputs, `tr(dW G dW^T) / tr(W G W^T)` with the balanced G,
which makes all layers equally important (0.22, 0.27 and 0.09 on demo-llava); a budget allocated by it may be worse than one
width for all.

Both are sums over rows of W, so some evenly spaced rows suffice (64 of a few thousand: accurate to about a tenth, which is
little next to a factor of four per bit). `dW` comes from the method itself, run on these rows: rounding, AWQ's and
SmoothQuant's scales, clipping. Only error feedback is estimated instead of run (`gptq.sketch`). Each layer of a group has its
own gradients if they are known.

Where an engine also quantizes the input, its rounding adds `sum_j ||w_j||^2 E[dx_j^2]` per token, for independent errors of
channels. For floats the error is relative: with magnitudes uniform in the logarithm `6.0e-4 x^2` for float8's mantissa of 3
bits and `9.6e-3 x^2` for NVFP4's of 1 (too much where a few channels dominate, as a token's largest value is exact). For int8
it is a twelfth of the squared step, which follows each token's largest value. That value is not in the statistics and is
estimated as the larger of the largest channel's mean square and the expected maximum of `in` normal variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics import ActFormat
from vlmcompress.numerics.statistics.inputs import GroupStats, quadratic
from vlmcompress.quantization import schemes
from vlmcompress.quantization.schemes import Quantizer, QuantizerOptions, Smoothing

ROWS = 64  # number of rows of a group, about, on which errors are computed
_LEAST_ROWS = 8  # fewest rows per layer
_FLOAT_NOISE = {bits: math.log(2) / 1.5 / 4**mantissa / 12 for bits, mantissa in ((8, 3), (4, 1))}
"""Bits of a float -> relative squared rounding error E[ulp^2] / 12 / E[x^2], for log x uniform."""

Squares = Mapping[str, float]
"""Modality -> mean of `(dL/dY)^2` over its tokens and the channels of Y."""


class Predictor:
    """Predicts the errors of one group under any method.

    Methods with the same balance share matrices and factors; only the last balance's are cached, so group calls by balance.

    Args:
        weights: `[out_i, in]` of each layer of the group, any float dtype; only some rows are kept.
        stats: statistics of the group's input.
        squares: for each layer, mean squared gradients by modality; None: relative output errors are predicted instead.
        balance: balance that weighs the modalities in relative errors.
        rows: about how many of the group's rows errors are computed on.
        scale_dtype: the dtype that scales are stored in.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        stats: GroupStats,
        squares: Sequence[Squares] | None = None,
        *,
        balance: Any = "off",
        rows: int = ROWS,
        scale_dtype: torch.dtype = torch.bfloat16,
    ):
        self.stats, self.scale_dtype = stats, scale_dtype
        self.rows = [evenly(weight, rows * len(weight) / sum(map(len, weights))) for weight in weights]
        self.shares = [len(weight) / len(rows) for weight, rows in zip(weights, self.rows, strict=True)]
        self._balance: Any = None  # the last balance, with its statistics and what was prepared from them
        self._balanced = stats
        self._prepared: dict[Any, Any] = {}
        if squares is None:
            gram = stats.balanced(balance).gram()
            self.grams: list[Tensor | None] = [gram] * len(weights)
            sizes = [quadratic(rows, gram).sum().item() for rows in self.rows]
            self.factors = [1 / size if size > 0 else 0.0 for size in sizes]
            return
        grams: dict[tuple, Tensor | None] = {}
        for layer_squares in squares:
            key = tuple(sorted(layer_squares.items()))
            if key not in grams:
                grams[key] = (
                    stats.gram({m: layer_squares.get(m, 0.0) for m in stats.count})
                    if any(layer_squares.values())
                    else None
                )
        self.grams = [grams[tuple(sorted(layer_squares.items()))] for layer_squares in squares]
        self.factors = [0.5 * share for share in self.shares]  # dL = 1/2 sum f tr(dW G dW^T), scaled up to all rows

    @torch.no_grad()
    def error(self, module: Quantizer[Any], options: QuantizerOptions, *, smooths: bool = True) -> float:
        """Predicted loss increase (or sum of the layers' relative output errors) under a method.

        Args:
            module, options: a scheme and its options, as in `vlmcompress.quantization.schemes`.
            smooths: whether the op before the group can take a smoothing scale.
        """
        scheme = module.scheme(options)
        if scheme is None:
            return 0.0
        rows, stats, smoothing = self.rows, self.stats, Smoothing()
        if "gram" in module.needs(options).statistics:
            if (balance := options.balance or "off") != self._balance:
                self._balanced, self._prepared = self.stats, {}  # frees the previous ones
                self._balance, self._balanced = balance, self.stats.balanced(balance).merged()
            stats = self._balanced
        if smooths:
            smoothing = schemes.smooth(module, list(rows), stats, options, self.scale_dtype)
        if (scale := smoothing.scale) is not None:
            rows, stats = [row * scale for row in rows], stats.rescaled(scale)
        total, prepared = 0.0, self._prepared if scale is None else {}
        errors = schemes.sketch(module, rows, stats, options, self.scale_dtype, prepared, smoothing.factorization)
        for row, dw, gram, factor in zip(rows, errors, self.grams, self.factors, strict=True):
            if gram is None:
                continue
            noise = input_noise(scheme.activations, gram, scale) @ row.square().sum(0) if scheme.activations else 0.0
            # D is the error of W s. With inputs divided by s the output error is that of dW = D / s under the Gram matrix of
            # X.
            dw = dw if scale is None else dw / scale
            total += factor * (quadratic(dw, gram).sum().item() + float(noise))
        return total


def evenly(weight: Tensor, count: float) -> Tensor:
    """Take about `count` evenly spaced rows of `[out, in]` in float32, at least `_LEAST_ROWS` if there are that many."""
    step = max(1, round(len(weight) / max(count, _LEAST_ROWS)))
    return weight[step // 2 :: step].float()


def input_noise(activations: ActFormat, gram: Tensor, scale: Tensor | None = None) -> Tensor:
    """Expected squared rounding errors `sum_t E[dx_tj^2]`, `[in]`, of inputs with Gram matrix `gram [in, in]`, divided by
    `scale`.

    Tokens are weighted as in the matrix.
    """
    square = gram.diagonal() if scale is None else gram.diagonal() / scale.square()
    if activations.kind == "float":
        return _FLOAT_NOISE[activations.bits] * square
    # A token's largest value: that of the largest channel, or of `in` normal variables (expected square 2 ln(in) sigma^2).
    largest = torch.maximum(square.max(), 2 * math.log(len(square)) * square.mean())
    return (largest / (2 ** (activations.bits - 1) - 1) ** 2 / 12).expand(len(square))
