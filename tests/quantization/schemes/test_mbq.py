"""MBQ's candidates, losses and Gram form, against its formulas written out on activations."""

from __future__ import annotations

import pytest
import torch

from tests.kit.quant_data import MBQ, WIDTH, collected, inputs, losses, tokens, weight
from vlmcompress.numerics import fake_quantize, find_params, round_to_nearest
from vlmcompress.numerics.statistics.balance import Sensitivity
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.schemes import mbq, smooth, solve


def measured(rho: float):
    """Statistics of all three modalities with MBQ's weight attached."""
    stats = collected(tokens())
    stats.sensitivity = Sensitivity(rho)
    return stats


def test_candidates_are_the_published_grid():
    """Oracle: the formula element by element; the mean of a dead channel is 0."""
    mean = inputs(WIDTH).abs().mean(0)
    mean[3] = 0
    scales = mbq.candidates(mean, 20)
    assert len(scales) == 20 and torch.equal(scales[0], torch.ones(WIDTH))
    for k, s in enumerate(scales):
        plain = [max(x ** (k / 20), 1e-4) for x in mean.tolist()]
        norm = (max(plain) * min(plain)) ** 0.5
        torch.testing.assert_close(s, torch.tensor([x / norm for x in plain]))


def test_the_loss_is_the_published_one():
    """Oracle: the published formula, one token and channel at a time."""
    rho, d = 0.3, torch.randn(7, 5).tolist()
    kinds = ["text", "vision", "vision", "answer", "vision", "answer", "text"]
    rows = {
        kind: [x for row, k in zip(d, kinds, strict=True) if k == kind for x in row] for kind in ("vision", "answer")
    }
    total = sum(abs(x) for x in rows["answer"]) + rho * sum(abs(x) for x in rows["vision"])
    sums = {kind: sum(map(abs, values)) for kind, values in rows.items()}
    counts = {kind: len(values) for kind, values in rows.items()}
    assert mbq.loss(sums, counts, rho) == pytest.approx(total / (len(rows["answer"]) + len(rows["vision"])))


def test_the_loss_without_a_modality():
    """The other one decides; without both nothing can."""
    sums = {"text": 5.0, "vision": 3.0, "answer": 2.0}
    none = {"text": 9, "vision": 0, "answer": 4}
    assert mbq.loss(sums | {"vision": 0.0}, none, 0.5) == 2 / 4
    assert mbq.loss(sums | {"answer": 0.0}, none | {"vision": 6, "answer": 0}, 0.5) == 0.5 * 3 / 6
    with pytest.raises(ValueError, match="neither visual nor answer tokens"):
        mbq.loss(dict.fromkeys(sums, 0.0), none | {"answer": 0}, 0.5)


@pytest.mark.parametrize("rho", [0.02, 0.5, 4.0])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gram_form_minimizes_the_squared_error_form(rho, symmetric):
    """Oracle: `mean_answer(D^2) + rho mean_vision(D^2)` of each candidate from the activations, over a group of two layers."""
    parts, options = tokens(), mbq.Options(group_size=32, symmetric=symmetric)
    weights, fmt = [weight(40, WIDTH, 0), weight(24, WIDTH, 1)], mbq.SCHEME.scheme(options).weights
    pooled = torch.cat(list(parts.values())).abs().mean(0)
    scales, sums = mbq.candidates(pooled, options.grid), []
    gram = measured(rho).balanced("mbq").gram()
    for s in scales:
        total = 0.0
        for w in weights:
            counts = gram.diagonal() / s.square()
            params = find_params(w * s, fmt, scale_dtype=torch.bfloat16, importance=counts)
            new = fake_quantize(w * s, *params, fmt) / s
            loss = losses(parts, new, w)
            total += loss["answer"] + rho * loss["vision"]
        sums.append(total)
    best = min(range(len(scales)), key=sums.__getitem__)
    assert best > 0 or rho < 0.1, "the test needs inputs on which scaling pays"
    chosen = smooth(mbq.SCHEME, weights, measured(rho), options).scale
    torch.testing.assert_close(scales[0] if chosen is None else chosen, scales[best])


def test_rho_decides():
    """Visual and answer tokens have other large channels, so extreme weights choose otherwise."""
    weights, options = [weight(40, WIDTH)], mbq.Options(bits=3, group_size=32)
    few, many = (smooth(mbq.SCHEME, weights, measured(rho), options).scale for rho in (1e-4, 1e4))
    assert not torch.equal(few, many)


def test_weights_are_rounded_to_nearest():
    """No clipping and no error feedback after the search."""
    w, options = weight(40, WIDTH), mbq.Options(group_size=32)
    quantized = solve(mbq.SCHEME, [w], measured(0.5), options, torch.bfloat16).weights[0]
    plain = round_to_nearest(w, mbq.SCHEME.scheme(options).weights, scale_dtype=torch.bfloat16)
    assert torch.equal(quantized.q, plain.q) and torch.equal(quantized.scale, plain.scale)


def test_needs_gradients():
    assert "gradient" in QuantMethod(mbq.SCHEME, mbq.Options()).needs.statistics
    with pytest.raises(ValueError, match="gradient"):
        smooth(mbq.SCHEME, [weight(8, WIDTH)], collected(tokens()), mbq.Options(group_size=32))


def test_defaults_are_the_published_ones():
    wide, narrow = mbq.Options(), mbq.Options(activations=8)
    assert (wide.group_size, wide.symmetric, wide.grid, wide.objective) == (128, False, 20, "mae")
    assert (narrow.group_size, narrow.symmetric, narrow.bits, narrow.objective) == (-1, True, 4, "mae")
    assert mbq.SCHEME.scheme(narrow).activations.bits == 8 and mbq.SCHEME.scheme(wide).activations is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": 4}, "activations must be 16 or 8"),
        ({"activations": 8, "bits": 3}, "need 4 or 8 bits"),
        ({"activations": 8, "group_size": 128}, "group_size -1"),
        ({"activations": 8, "symmetric": False}, "symmetric true"),
        ({"activations": 8, "objective": "gram"}, "cannot account for 8-bit activations"),
        ({"objective": "block"}, "objective must be 'gram' or 'mae'"),
        ({"grid": 1}, "grid must be"),
        ({"bits": 9}, "bits must be"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        mbq.Options(**options)


def test_published_weights_are_those_of_the_balance():
    """The weights that the modalities' means get are `MBQ`."""
    gram = measured(MBQ["vision"]).balanced("mbq").gram()
    torch.testing.assert_close(gram, collected(tokens()).balanced(MBQ).gram())
