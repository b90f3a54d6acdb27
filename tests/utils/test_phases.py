"""Seconds by phase: each moment counts once, as of the innermost phase."""

from __future__ import annotations

from vlmcompress.utils import progress
from vlmcompress.utils.progress import phase, phase_seconds, timed_phases


def test_an_inner_phase_is_counted_apart(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0, 20.0, 24.0, 30.0, 31.5])  # outer, its inner, outer's end; outer again; alone
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with timed_phases() as seconds:
        with phase("outer"), phase("inner"):
            pass
        with phase("outer"):
            pass
        with timed_phases() as same, phase("alone"):
            assert same is seconds
        assert phase_seconds() == {"outer": 12.0, "inner": 2.0, "alone": 1.5}
    assert seconds == {"inner": 2.0, "outer": 12.0, "alone": 1.5} and phase_seconds() == {}


def test_nothing_is_measured_outside(monkeypatch):
    monkeypatch.setattr(progress.time, "perf_counter", None)
    with phase("x"):
        pass
