"""Calibration statistics, against the same quantities computed from all activations at once in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmcompress.numerics.statistics import collect
from vlmcompress.numerics.statistics import inputs as module
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import MODALITIES, ROWS, GroupStats, quadratic

WIDTH = 24


def batches(seed: int = 0, width: int = WIDTH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three batches `[2, tokens, width]` with masks of all four codes; the last has a single modality."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for tokens in (7, 30, 5):
        x = torch.randn(2, tokens, width, generator=generator) * torch.rand(width, generator=generator)
        mask = torch.randint(0, 4, (2, tokens), generator=generator, dtype=torch.uint8)
        result.append((x, torch.full_like(mask, 2) if tokens == 5 else mask))
    return result


def collected(data, needs=("gram", "absmax", "absmean")) -> GroupStats:
    collector = Collector(data[0][0].shape[-1], needs)
    for x, mask in data:
        collector.add(x, mask)
    return collector.finish()


def rows_of(data, code: int) -> torch.Tensor:
    """All tokens `[n, width]` of one modality, float64."""
    return torch.cat([x[mask == code] for x, mask in data]).double()


@pytest.mark.parametrize("width", [1, 24, 300, 515])
def test_matches_all_activations_at_once(width, monkeypatch):
    """Oracle: X^T X, max and mean of |X| in float64, per modality; widths around and beyond the block size."""
    data = batches(width=width)
    stats = collected(data)
    for code, name in enumerate(MODALITIES, start=1):
        x = rows_of(data, code)
        assert stats.count[name] == len(x)
        torch.testing.assert_close(stats.gram({name: 1.0}).double(), x.T @ x, rtol=1e-5, atol=1e-4)
    x = torch.cat([rows_of(data, code) for code in (1, 2, 3)])
    torch.testing.assert_close(stats.gram().double(), x.T @ x, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(stats.absmax().double(), x.abs().amax(0))
    torch.testing.assert_close(stats.absmean().double(), x.abs().mean(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(stats.gram(), stats.gram().T)


def test_weights_of_modalities():
    """Oracle: the weighted sum of each modality's own Gram matrix."""
    data = batches()
    stats = collected(data)
    weights = {"text": 0.5, "vision": 2.0}
    expected = 0.5 * rows_of(data, 1).T @ rows_of(data, 1) + 2.0 * rows_of(data, 2).T @ rows_of(data, 2)
    torch.testing.assert_close(stats.gram(weights).double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="unknown modalities"):
        stats.gram({"audio": 1.0})
    with pytest.raises(ValueError, match="weight 0"):
        stats.gram({"vision": 0.0})


def test_no_mask_means_text():
    collector = Collector(WIDTH)
    collector.add(batches()[0][0])
    stats = collector.finish()
    assert stats.count == {"text": 14, "vision": 0, "answer": 0}
    assert list(stats._pending) == ["text"], "a modality that does not occur costs no memory"


def test_absmax_alone_keeps_no_gram():
    """A method that needs maxima pays for maxima."""
    stats = collected(batches(), needs=["absmax"])
    assert not stats._gram and not stats._pending and not stats._abssum
    with pytest.raises(ValueError, match="'gram' was not collected"):
        stats.gram()


def test_nothing_reads_a_gram_matrix_below_its_block_upper_triangle(monkeypatch):
    """There it has no values, and on a CPU no memory."""
    monkeypatch.setattr(collect, "ROWS", 8)
    collector, x = Collector(300), torch.randn(8, 300)
    collector.add(x)
    stats = collector.finish()
    stats._gram["text"][256:, :256] = torch.nan
    torch.testing.assert_close(stats.gram(), x.T @ x, rtol=1e-4, atol=1e-4)
    assert stats.error(x, x) == {"text": pytest.approx(1)}


def test_rescaled_equals_statistics_of_scaled_input():
    """Oracle: statistics collected from X / s."""
    data = batches()
    s = torch.rand(WIDTH) + 0.1
    direct = collected([(x / s, mask) for x, mask in data])
    closed = collected(data).rescaled(s)
    torch.testing.assert_close(closed.gram(), direct.gram(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(closed.absmax(), direct.absmax())
    torch.testing.assert_close(closed.absmean(), direct.absmean())
    assert closed.count == direct.count
    with pytest.raises(ValueError, match="positive"):
        closed.rescaled(torch.zeros(WIDTH))


def test_error_is_the_relative_output_error():
    """Oracle: ||X dW^T||^2 / ||X W^T||^2 from the activations."""
    data = batches()
    w, dw = torch.randn(10, WIDTH), 0.1 * torch.randn(10, WIDTH)
    errors = collected(data).error(dw, w)
    assert list(errors) == ["text", "vision", "answer"]
    for code, name in enumerate(MODALITIES, start=1):
        x = rows_of(data, code)
        expected = (x @ dw.double().T).square().sum() / (x @ w.double().T).square().sum()
        assert errors[name] == pytest.approx(expected.item(), rel=1e-4)
    assert all(value == 0.0 for value in collected(data).error(dw, torch.zeros_like(w)).values())


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 70), block=st.integers(1, 80), seed=st.integers(0, 9999))
def test_quadratic_form(rows, width, block, seed):
    """Oracle: the diagonal of d G d^T in float64, for any cut into blocks; the lower triangle must not be read."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(50, width, generator=generator)
    d = torch.randn(rows, width, generator=generator)
    gram = x.T @ x
    before, module._BLOCK = module._BLOCK, block
    try:
        upper = gram.clone()
        for a, b in module._blocks(width):
            upper[b:, a:b] = float("nan")
        traces = quadratic(d, upper)
    finally:
        module._BLOCK = before
    expected = torch.einsum("ri,ij,rj->r", d.double(), gram.double(), d.double())
    torch.testing.assert_close(traces.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 30, ROWS])
def test_rows_that_are_not_multiplied_yet_count_everywhere(rows, monkeypatch):
    """Oracle: sums of all, none and some rows of each modality are multiplied by the collector."""
    monkeypatch.setattr(collect, "ROWS", rows)
    data, weights = batches(), {"text": 0.5, "vision": 0.5, "answer": 2.0}
    stats = collected(data)
    x = [rows_of(data, code) for code in (1, 2, 3)]
    expected = sum(w * part.T @ part for w, part in zip(weights.values(), x, strict=True))
    torch.testing.assert_close(stats.gram(weights).double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(stats.importance().double(), torch.cat(x).square().sum(0), rtol=1e-5, atol=1e-4)
    dw, w = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    errors = [(part @ dw.double().T).square().sum() / (part @ w.double().T).square().sum() for part in x]
    assert list(stats.error(dw, w).values()) == pytest.approx([error.item() for error in errors], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [300, 1100])
def test_products_lose_nothing(width, dtype):
    """Oracle: float64. Products of rows in bfloat16 may be computed by instructions that round float32 to bfloat16; those of
    other rows may not, and the setting is as before afterwards."""
    x, gram = torch.randn(400, width, generator=torch.Generator().manual_seed(0)).to(dtype), torch.zeros(width, width)
    before = torch.get_float32_matmul_precision()
    module.add_product(gram, x, 0.5, fresh=True)
    assert torch.get_float32_matmul_precision() == before
    exact = (0.5 * x.double().T @ x.double()).triu()
    assert (gram.triu() - exact).norm() < 1e-6 * exact.norm()


def test_half_precision_inputs_are_accumulated_in_float32():
    """10 000 bfloat16 tokens: a bfloat16 accumulator would stop counting at 256."""
    collector = Collector(4, ["gram", "absmean"])
    collector.add(torch.ones(10_000, 4, dtype=torch.bfloat16))
    stats = collector.finish()
    assert (stats.gram() == 10_000).all() and (stats.absmean() == 1).all()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: s.add(torch.ones(3, WIDTH + 1)), "expected inputs of 24 features"),
        (lambda s: s.add(torch.ones(3, WIDTH), torch.ones(4)), "mask has 4 entries for 3 tokens"),
        (lambda s: s.finish().gram(), "no calibration token reached"),
        (lambda s: Collector(WIDTH, ["hessian"]), "unknown statistics"),
    ],
)
def test_bad_input_names_the_problem(act, message):
    with pytest.raises(ValueError, match=message):
        act(Collector(WIDTH))


@pytest.mark.parametrize("needs", [["gram"], ["absmax"], ["absmean"]])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_one_nan_is_found(needs, bad):
    """It shows in any of the statistics, however many rows come after it."""
    collector, x = Collector(WIDTH, needs), torch.randn(3, WIDTH)
    x[1, 7] = float(bad)
    collector.add(x.bfloat16())
    for _ in range(3):
        collector.add(torch.randn(ROWS, WIDTH).bfloat16())
    with pytest.raises(ValueError, match="activations hold NaN or Inf"):
        collector.finish()


def test_ignored_tokens_may_hold_anything():
    """Padding is masked out before it is looked at."""
    collector = Collector(WIDTH)
    x = torch.ones(3, WIDTH)
    x[1] = float("nan")
    collector.add(x, torch.tensor([1, 0, 2]))
    stats = collector.finish()
    assert stats.count == {"text": 1, "vision": 1, "answer": 0}
