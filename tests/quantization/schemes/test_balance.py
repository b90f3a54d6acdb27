"""The weighing of modalities, against statistics of tokens that are repeated until they count as much as their weight."""

from __future__ import annotations

import pytest
import torch

from tests.kit.quant_data import COUNTS, MBQ, WIDTH, collected, losses, slow_gptq, tokens, weight
from vlmcompress.numerics import fake_quantize, find_params
from vlmcompress.numerics.statistics.balance import Sensitivity, require_balance
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import MODALITIES, STATISTICS, GroupStats
from vlmcompress.quantization.schemes import REGISTRY, awq, gptq, int8, smooth, solve

RATIO = {"text": 3, "vision": 1, "answer": 6}  # repetitions that make the counts equal
METHODS = {"gptq": {"group_size": 32}, "awq": {"group_size": 32}, "int8": {}}


def run(name: str, stats: GroupStats, **options) -> list[torch.Tensor]:
    """Smoothing scale (ones without) and codes of a group of two layers."""
    method = REGISTRY.get(name)
    chosen = method.OPTIONS(**METHODS[name], **options)
    weights = [weight(40, WIDTH, 0), weight(24, WIDTH, 1)]
    s = smooth(method, weights, stats, chosen).scale
    s = torch.ones(WIDTH) if s is None else s
    solution = solve(method, [w * s for w in weights], stats.rescaled(s), chosen, torch.bfloat16)
    return [s, *(q.dequantize(torch.float32) for q in solution.weights)]


@pytest.mark.parametrize("balance", ["ratio", {"text": 2.0, "vision": 0.5, "answer": 1.5}, MBQ], ids=str)
def test_statistics_are_weighted_means_of_the_modalities(balance):
    """Oracle: the formulas of `vlmcompress.numerics.statistics.inputs`, in float64 from the activations."""
    parts = tokens()
    stats = collected(parts).balanced(balance)
    weights = dict.fromkeys(MODALITIES, 1.0) if balance == "ratio" else balance
    share = {name: w / sum(weights.values()) for name, w in weights.items()}
    x = {name: part.double() for name, part in parts.items()}
    gram = sum(COUNTS.values()) * sum(share[m] * x[m].T @ x[m] / COUNTS[m] for m in MODALITIES)
    torch.testing.assert_close(stats.gram().double(), gram, rtol=1e-5, atol=1e-3)
    mean, top = (sum(share[m] * f(x[m].abs()) for m in MODALITIES) for f in (lambda a: a.mean(0), lambda a: a.amax(0)))
    torch.testing.assert_close(stats.absmean().double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats.absmax().double(), top, rtol=1e-5, atol=1e-6)
    s = torch.rand(WIDTH) + 0.1
    balanced, other = stats.rescaled(s), collected(parts).rescaled(s).balanced(balance)
    assert torch.equal(balanced.gram(), other.gram()) and torch.equal(balanced.absmax(), other.absmax())


def test_mbq_is_the_published_sum_of_means():
    """Oracle: `mean_answer(D^2) + rho mean_vision(D^2)` of MBQ's code, for the output error D of a weight change."""
    parts, rho = tokens(), 0.7
    stats = collected(parts)
    stats.sensitivity = Sensitivity(rho)
    changes = [weight(16, WIDTH, seed) * 0.01 for seed in (1, 2)]

    def published(change: torch.Tensor) -> float:
        vision, answer = ((parts[name] @ change.T).square().mean() for name in ("vision", "answer"))
        return float(answer + rho * vision)

    sums = [float((change @ stats.balanced("mbq").gram() * change).sum()) for change in changes]
    assert sums[0] / sums[1] == pytest.approx(published(changes[0]) / published(changes[1]), rel=1e-4)


@pytest.mark.parametrize("name", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("balance", "repeat"),
    [("ratio", RATIO), (MBQ, {"text": 0, "vision": 1, "answer": 12}), ({"text": 1, "vision": 3, "answer": 0.5}, None)],
    ids=["ratio", "mbq", "counts"],
)
def test_weighing_is_repeating_tokens(name, balance, repeat):
    """Oracle: pooled statistics of a calibration set in which each modality has as many tokens as its weight asks for.

    Weights that are the counts themselves (1 : 3 : 0.5) change nothing. Scales, search and clipping all have to agree.
    """
    results = run(name, collected(tokens()), balance=balance)
    expected = run(name, collected(tokens(), repeat))
    torch.testing.assert_close(results[0], expected[0], rtol=1e-4, atol=1e-5)
    for tensor, other in zip(results[1:], expected[1:], strict=True):
        alike = torch.isclose(tensor, other, rtol=1e-2, atol=1e-5).all(1)  # float32 sums differ: a rounding may tip
        assert alike.double().mean() >= 0.9
    if repeat is not None:
        assert not torch.allclose(results[1], run(name, collected(tokens()))[1], atol=1e-3), "the balance must matter"


def test_awq_minimizes_mbqs_objective():
    """Oracle: MBQ's squared-error loss of every candidate, `mean_answer(D^2) + rho mean_vision(D^2)`, from the activations."""
    parts, w = tokens(), weight(40, WIDTH)
    options = awq.Options(group_size=32, balance=MBQ)
    fmt, stats = awq.SCHEME.scheme(options).weights, collected(parts)
    scales = [torch.ones(WIDTH), *awq.candidates([w], stats.balanced(MBQ), options)]
    objective = []
    for s in scales:
        counts = stats.balanced(MBQ).gram().diagonal() / s.square()
        new = fake_quantize(w * s, *find_params(w * s, fmt, scale_dtype=torch.bfloat16, importance=counts), fmt) / s
        loss = losses(parts, new, w)
        objective.append(loss["answer"] + 0.5 * loss["vision"])
    best = min(range(len(scales)), key=objective.__getitem__)
    assert best > 0, "the test needs inputs on which scaling pays"
    torch.testing.assert_close(smooth(awq.SCHEME, [w], stats, options).scale, scales[best])


def test_weighted_gptq_is_optimal_brain_quantization_of_the_weighted_hessian():
    """Oracle: the slow loop of test_gptq on `sum_m w_m X_m^T X_m / n_m`."""
    parts, w = tokens(), weight(20, WIDTH)
    options = gptq.Options(group_size=32, balance="ratio")
    gram = sum(x.T @ x / len(x) for x in parts.values())
    slow = slow_gptq(w, gram, gptq.SCHEME.scheme(options).weights, 0.01, True)
    fast = solve(gptq.SCHEME, [w], collected(parts), options, torch.bfloat16).weights[0].dequantize(torch.float32)
    assert torch.isclose(fast.double(), slow, atol=1e-6).all(1).double().mean() >= 0.9


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_balance_lowers_the_loss_it_names(name):
    """The mean loss over modalities falls against pooling, and all weight on one modality serves that one best."""
    parts, w = tokens(), weight(40, WIDTH, 0)
    loss_by_balance = {}
    for key in ("off", "ratio", *MODALITIES):
        balance = {m: float(m == key) for m in MODALITIES} if key in MODALITIES else key
        s, new, _ = run(name, collected(parts), bits=3, balance=balance)
        loss_by_balance[key] = losses(parts, new / s, w)
    assert sum(loss_by_balance["ratio"].values()) < sum(loss_by_balance["off"].values())
    for m in MODALITIES:
        assert loss_by_balance[m][m] == min(loss[m] for loss in loss_by_balance.values())


@pytest.mark.parametrize("balance", ["ratio", {"text": 1, "vision": 2, "answer": 0}], ids=str)
def test_smoothquant_scale(balance):
    """Oracle: eq. 4 channel by channel, on the weighted mean of the modalities' maxima."""
    parts, w = tokens(), weight(8, WIDTH)
    weights = {"text": 1, "vision": 1, "answer": 1} if balance == "ratio" else balance
    s = smooth(int8.SCHEME, [w], collected(parts), int8.Options(alpha=0.7, balance=balance)).scale
    for j in range(WIDTH):
        top = sum(weights[m] * float(parts[m][:, j].abs().max()) for m in MODALITIES) / sum(weights.values())
        assert float(s[j]) == pytest.approx(top**0.7 / float(w[:, j].abs().max()) ** 0.3, rel=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_off_is_the_default_and_changes_no_bit(name):
    """Pooled statistics are passed on as they are: the same object reaches the method, and its own functions give the same."""
    method, stats = REGISTRY.get(name), collected(tokens())
    assert method.OPTIONS().balance == "off" and stats.balanced("off") is stats
    default, off = run(name, stats), run(name, stats, balance="off")
    assert all(torch.equal(tensor, other) for tensor, other in zip(default, off, strict=True))
    options, w = method.OPTIONS(**METHODS[name]), weight(40, WIDTH)
    direct = method.quantize(w, stats, options, torch.bfloat16)
    assert torch.equal(direct.q, solve(method, [w], stats, options, torch.bfloat16).weights[0].q)
    x = torch.cat(list(tokens().values()))
    assert torch.equal(stats.absmax(), x.abs().amax(0))


def test_a_modality_without_tokens():
    collector = Collector(WIDTH, STATISTICS)
    collector.add(tokens()["vision"], torch.full((COUNTS["vision"],), 2))
    stats = collector.finish()
    with pytest.raises(ValueError, match="balance needs text and answer tokens, and none reached this layer"):
        stats.balanced("ratio")
    only = stats.balanced({"text": 0, "vision": 3, "answer": 0})
    torch.testing.assert_close(only.gram(), stats.gram())


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ("even", "balance must be off, ratio, mbq or {text: w, vision: w, answer: w}, got 'even'"),
        (True, "balance must be off, ratio, mbq or"),
        (None, "balance must be off, ratio, mbq or"),
        (0.5, "balance must be off, ratio, mbq or"),
        ({}, "balance must give weights of text, vision, answer, got none"),
        ({"vision": 1.0}, "balance must give weights of text, vision, answer, got vision"),
        ({"text": 1, "vision": 1, "answer": 1, "audio": 1}, "got text, vision, answer, audio"),
        ({"text": 1, "vision": "2", "answer": 1}, "balance must give vision a number of at least 0, got '2'"),
        ({"text": 1, "vision": True, "answer": 1}, "balance must give vision a number"),
        ({"text": 1, "vision": -1, "answer": 1}, "balance must give vision a number of at least 0, got -1"),
        ({"text": 1, "vision": 1, "answer": float("nan")}, "balance must give answer a number"),
        ({"text": 0, "vision": 0, "answer": 0}, "balance must give one modality a weight above 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", METHODS)
def test_a_bad_balance_names_a_remedy(name, balance, message):
    with pytest.raises(ValueError) as caught:
        REGISTRY.get(name).OPTIONS(balance=balance)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_good_balances():
    assert require_balance(False) == "off", "YAML reads `off` as false"
    assert awq.Options(balance={"answer": 1, "vision": 0.5, "text": 0}).balance == MBQ
