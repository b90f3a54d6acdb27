"""Predicted errors against the activations themselves, and against finished layers."""

from __future__ import annotations

import pytest
import torch

from tests.kit.quant_data import inputs, weight
from vlmcompress.numerics import ActFormat, round_activations
from vlmcompress.numerics.statistics.balance import Sensitivity
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import MODALITIES, STATISTICS, GroupStats
from vlmcompress.quantization import schemes
from vlmcompress.quantization.calibration.predict import Predictor, evenly, input_noise
from vlmcompress.quantization.schemes import REGISTRY

WIDTH = 128
SQUARES = {"text": 0.3, "vision": 0.01, "answer": 2.0}


def observed(seed: int = 0) -> tuple[dict[str, torch.Tensor], GroupStats]:
    """Inputs by modality, of different covariance, and their statistics."""
    parts = {name: inputs(WIDTH, 100 + 80 * i, seed=seed + i) for i, name in enumerate(MODALITIES)}
    collector = Collector(WIDTH, STATISTICS)
    for code, x in enumerate(parts.values(), start=1):
        collector.add(x, torch.full((len(x),), code))
    return parts, collector.finish()


def finished(name: str, options, weights: list[torch.Tensor], stats: GroupStats) -> list[torch.Tensor]:
    """The weight errors of a group that was really quantized, in terms of the unscaled input."""
    module = REGISTRY.get(name)
    scale = schemes.smooth(module, weights, stats, options).scale
    scaled = weights if scale is None else [w * scale for w in weights]
    solved = schemes.solve(module, scaled, stats if scale is None else stats.rescaled(scale), options, torch.bfloat16)
    errors = [q.dequantize(torch.float32) - w for q, w in zip(solved.weights, scaled, strict=True)]
    return errors if scale is None else [error / scale for error in errors]


def second_order(parts: dict, errors: list[torch.Tensor], squares: list[dict]) -> float:
    """`1/2 sum f_m D^2` over tokens and outputs, in float64 from the activations."""
    return 0.5 * sum(
        layer_squares[m] * (x.double() @ dw.double().T).square().sum().item()
        for dw, layer_squares in zip(errors, squares, strict=True)
        for m, x in parts.items()
    )


@pytest.mark.parametrize("name", ["rtn", "awq"])
@pytest.mark.parametrize("bits", [2, 4])
def test_all_rows_give_the_exact_second_order_loss(name, bits):
    parts, stats = observed()
    weights = [weight(24, WIDTH, 1), weight(16, WIDTH, 2)]
    squares = [SQUARES, {"text": 1.0, "vision": 0.5, "answer": 0.1}]
    options = REGISTRY.get(name).OPTIONS(bits=bits, group_size=32)
    predictor = Predictor(weights, stats, squares, rows=40)
    expected = second_order(parts, finished(name, options, weights, stats), squares)
    assert predictor.error(REGISTRY.get(name), options) == pytest.approx(expected, rel=1e-3)


def test_without_gradients_errors_are_relative_to_the_balanced_output():
    parts, stats = observed()
    weights = [weight(24, WIDTH, 1), 100 * weight(24, WIDTH, 1)]
    rtn = REGISTRY.get("rtn")
    options = rtn.OPTIONS(bits=3, group_size=32)
    dw = finished("rtn", options, weights, stats)[0].double()
    off = torch.cat(list(parts.values())).double()
    expected = ((off @ dw.T).square().sum() / (off @ weights[0].double().T).square().sum()).item()
    predicted = Predictor(weights, stats, rows=48).error(rtn, options)
    assert predicted == pytest.approx(2 * expected, rel=1e-2)  # the size of a layer's weights is no matter
    means = [
        [(x.double() @ m.T).square().sum(1).mean().item() for x in parts.values()] for m in (dw, weights[0].double())
    ]
    ratio = Predictor(weights, stats, balance="ratio", rows=48).error(rtn, options)
    assert ratio == pytest.approx(2 * sum(means[0]) / sum(means[1]), rel=1e-2)


@pytest.mark.parametrize("name", ["rtn", "awq", "gptq"])
def test_predictions_from_few_rows_rank_finished_groups(name):
    """Real errors of 24 groups at four widths: predicted within a quarter each, and in nearly the same order."""
    module, real, predicted = REGISTRY.get(name), [], []
    for seed in range(6):
        parts, stats = observed(10 * seed)
        weights = [weight(256, WIDTH, seed) * 3**seed]
        squares = [{m: value * (1 + seed) for m, value in SQUARES.items()}]
        predictor = Predictor(weights, stats, squares, rows=48)
        for bits in (2, 3, 4, 8):
            options = module.OPTIONS(bits=bits, group_size=32)
            real.append(second_order(parts, finished(name, options, weights, stats), squares))
            predicted.append(predictor.error(module, options))
    ranks = [torch.tensor(values).argsort().argsort().double() for values in (real, predicted)]
    assert torch.corrcoef(torch.stack(ranks))[0, 1] > 0.97
    for finished_error, other in zip(real, predicted, strict=True):
        assert other == pytest.approx(finished_error, rel=0.25)


def test_error_feedback_is_predicted_and_shared():
    """GPTQ's predicted error is below rounding's as its real one is, and one factor serves every width of a balance."""
    _, stats = observed()
    weights, gptq, rtn = [weight(64, WIDTH)], REGISTRY.get("gptq"), REGISTRY.get("rtn")
    predictor = Predictor(weights, stats, [SQUARES], rows=64)
    for bits in (3, 4, 8):
        fed = predictor.error(gptq, gptq.OPTIONS(bits=bits, group_size=32))
        assert fed < 0.7 * predictor.error(rtn, rtn.OPTIONS(bits=bits, group_size=32))
    assert len(predictor._prepared) == 1


@pytest.mark.parametrize("squares", [None, [SQUARES, {"text": 1.0, "vision": 0.5, "answer": 0.1}]])
def test_what_methods_share_changes_no_prediction(squares):
    """Oracle: each method with statistics of its own, nothing kept; in an order that goes back and forth between balances."""
    _, stats = observed()
    stats.sensitivity = Sensitivity(0.4)
    weights = [weight(24, WIDTH, 1), weight(16, WIDTH, 2)]
    predictor = Predictor(weights, stats, squares, rows=20)
    methods = [("rtn", {"bits": 3}), ("mbq", {"group_size": 32})]
    for balance in ("off", "mbq", "ratio", "off"):
        methods += [("gptq", {"bits": bits, "group_size": 32, "balance": balance}) for bits in (2, 4)]
        methods += [("awq", {"group_size": 32, "balance": balance}), ("int8", {"balance": balance})]
    for name, options in methods:
        module = REGISTRY.get(name)
        scheme_options, rows, used = module.OPTIONS(**options), predictor.rows, stats
        scale = schemes.smooth(module, rows, stats, scheme_options).scale
        if scale is not None:
            rows, used = [row * scale for row in rows], stats.rescaled(scale)
        expected, input_noises = 0.0, module.scheme(scheme_options).activations
        errors = schemes.sketch(module, rows, used, scheme_options, torch.bfloat16, {})
        for row, dw, gram, factor in zip(rows, errors, predictor.grams, predictor.factors, strict=True):
            dw = dw if scale is None else dw / scale
            expected += factor * float(torch.einsum("oi,ij,oj->", dw.double(), gram.double(), dw.double()))
            if input_noises:
                expected += factor * float(input_noise(input_noises, gram, scale) @ row.square().sum(0))
        assert predictor.error(module, scheme_options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["float", "int"])
def test_input_rounding_against_rounded_inputs(kind):
    """Oracle: inputs rounded token by token as an engine does; the estimate is within a factor of two."""
    x = inputs(WIDTH, 2048)
    rounded = round_activations(x, ActFormat(kind, 8, dynamic=True))
    w = weight(64, WIDTH)
    real = ((rounded - x) @ w.T).square().sum().item()
    noise = input_noise(ActFormat(kind, 8, dynamic=True), x.T @ x)
    assert 0.5 < (noise @ w.square().sum(0)).item() / real < 2


def test_eight_bit_activations_cost_more_than_weights_alone():
    _, stats = observed()
    predictor = Predictor([weight(64, WIDTH)], stats, [SQUARES])
    fp8, wide = REGISTRY.get("fp8"), REGISTRY.get("w8a16")
    assert predictor.error(fp8, fp8.OPTIONS()) > predictor.error(wide, wide.OPTIONS())
    assert predictor.error(REGISTRY.get("none"), REGISTRY.get("none").OPTIONS()) == 0


def test_modalities_without_gradient_weigh_nothing():
    _, stats = observed()
    gptq = REGISTRY.get("gptq")
    predictor = Predictor(
        [weight(16, WIDTH), weight(16, WIDTH, 3)], stats, [dict.fromkeys(MODALITIES, 0.0), {"answer": 1.0}]
    )
    alone = Predictor([weight(16, WIDTH, 3)], stats, [{"answer": 1.0}])
    assert predictor.error(gptq, gptq.OPTIONS(bits=3)) == pytest.approx(
        alone.error(gptq, gptq.OPTIONS(bits=3)), rel=1e-5
    )


def test_rows_are_evenly_spaced_and_at_least_eight():
    w = torch.arange(100.0)[:, None]
    assert len(evenly(w, 10)) == 10 and len(evenly(w, 1)) in (8, 9) and len(evenly(w[:5], 1)) == 5
    assert evenly(w, 1000).shape == w.shape
    assert evenly(w, 10).diff(dim=0).unique().tolist() == [10.0]
