"""Loads, the order of turns, and limits: what is written on the command line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmcompress.evaluation.speed.client import parse_load
from vlmcompress.evaluation.speed.measure import parse_slo
from vlmcompress.evaluation.speed.serving import abba
from vlmcompress.utils.errors import UserError


def test_closed_load() -> None:
    load = parse_load("closed:8")
    assert (load.kind, load.amount, str(load)) == ("closed", 8, "closed:8")
    assert load.arrivals(5, seed=0) is None
    assert load.default_requests == 128
    assert parse_load("closed:1").default_requests == 64
    assert parse_load("rate:2.5").default_requests == 150


def test_poisson_arrivals() -> None:
    """Gaps of a Poisson process of rate r have mean 1/r and, being exponential, the same standard deviation."""
    load = parse_load("rate:2.5")
    times = load.arrivals(20_000, seed=3)
    assert times is not None and str(load) == "rate:2.5"
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.4, rel=0.03)
    assert deviation == pytest.approx(0.4, rel=0.04)
    assert times == load.arrivals(20_000, seed=3) != load.arrivals(20_000, seed=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("close:8", "no load 'close'; did you mean 'closed'"),
        ("closed", "'' should be a whole number of clients above 0"),
        ("closed:2.5", "'2.5' should be a whole number"),
        ("rate:-1", "'-1' should be requests per second above 0"),
        ("rate:nan", "'nan' should be requests"),
    ],
)
def test_bad_load(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_load(text)


def test_slo() -> None:
    assert parse_slo(None) == {}
    assert parse_slo("ttft=200, tpot=50") == {"ttft": 200.0, "tpot": 50.0}
    for text, message in (
        ("tfft=1", "did you mean 'ttft'"),
        ("e2e=0", "above 0"),
        ("e2e", "above 0"),
        ("", "no time ''"),
    ):
        with pytest.raises(UserError, match=message):
            parse_slo(text)


@given(st.text(max_size=8) | st.integers().map(str) | st.floats().map(str), st.sampled_from(["closed", "rate"]))
def test_any_load_and_limit_is_bounded_or_refused(number: str, kind: str) -> None:
    with contextlib.suppress(UserError):
        assert 0 < parse_load(f"{kind}:{number}").amount <= 10_000
    with contextlib.suppress(UserError):
        assert 0 < parse_slo(f"ttft={number}")["ttft"] < float("inf")


def test_abba_cancels_a_linear_drift() -> None:
    order = abba(4)
    assert [side[0] for side, _ in order] == list("bccbbccb")
    assert sorted(order) == sorted((side, repeat) for side in ("baseline", "candidate") for repeat in range(4))
    when = {side: [time for time, (name, _) in enumerate(order) if name == side] for side, _ in order}
    assert sum(when["baseline"]) == sum(when["candidate"])
    for repeat in range(4):  # a pair's runs are neighbours
        first, second = (time for time, (_, number) in enumerate(order) if number == repeat)
        assert second == first + 1
