"""Format a benchmark's results for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.results import Bench, LoadRun
from vlmcompress.utils.text import size, table

METRICS = {
    "request_throughput": "requests per second",
    "output_throughput": "output tokens per second",
    "goodput": "good requests per second",
    "ttft_p50_ms": "time to first token, p50",
    "ttft_p99_ms": "time to first token, p99",
    "tpot_p50_ms": "time per output token, p50",
    "itl_p99_ms": "between two tokens, p99",
    "e2e_p50_ms": "whole request, p50",
    "e2e_p99_ms": "whole request, p99",
}


def speed_text(bench: Bench) -> str:
    """Speed in each mode and state, and memory, as text."""
    turns = f"{bench.repeats} turn{'s' * (bench.repeats > 1)} a side"
    work = f"{bench.requests} requests a burst, {bench.out_tokens} tokens an answer, {turns}"
    rows: list[tuple[str, ...]]
    lines = [f"load {bench.load}, {work}; {Path(bench.source).name}"]
    for mode, states in bench.summary.items():
        for state, ratios in states.items():
            rows = [("", "baseline", "candidate", "candidate is", "in the repeats")]
            for name, title in METRICS.items():
                if r := ratios.get(name):
                    sides = (f"{value:.4g} {r.unit}" for value in (r.baseline, r.candidate))
                    rows.append((title, *sides, words.pace(r), words.spread(r)))
            lines += ["", f"{mode}, {'no caches' if state == 'cold' else 'caches on'}", table(rows)]
    if bench.memory:
        memory = bench.memory.values()
        rows = [
            ("", *bench.memory),
            ("weights", *(size(side.weight_bytes) for side in memory)),
            ("KV cache of a token", *(size(side.kv_bytes_per_token) for side in memory)),
            ("KV cache of a request", *(size(side.kv_bytes_per_request) for side in memory)),
            ("requests that fit", *(f"{side.max_concurrency:.4g}" for side in memory)),
        ]
        lines += ["", "memory", table(rows)]
    if drafted := _drafted(bench):
        lines += ["", "speculative decoding", table(drafted)]
    failed = sum(run.failed for run in bench.runs)
    if failed:
        lines += ["", f"{failed} of {failed + sum(run.completed for run in bench.runs)} requests failed."]
    return "\n".join(lines)


def _drafted(bench: Bench) -> list[tuple[str, ...]]:
    """Rows about drafted and accepted tokens, by side, mode and state; a step produces one token more than it accepts.

    The candidate's steps are compared with the baseline's: drafting gains if they produce more tokens than they cost.
    """
    rows: list[tuple[str, ...]] = []
    for side, mode, state in dict.fromkeys((run.side, run.mode, run.state) for run in bench.runs):
        runs = [run for run in bench.runs if (run.side, run.mode, run.state) == (side, mode, state)]
        plain = [run for run in bench.runs if (run.side, run.mode, run.state) == ("baseline", mode, state)]
        drafts, drafted, accepted = (
            sum(counts) for counts in zip(*((r.drafts, r.drafted, r.accepted) for r in runs), strict=True)
        )
        if drafts and drafted:
            # By the server's clock, if the baseline does not draft: on a busy machine, tokens reach the client in bunches.
            seconds, before, drafting = _step_seconds(runs), _step_seconds(plain), any(run.drafts for run in plain)
            caches = "no caches" if state == "cold" else "caches on"
            counts = (
                f"{drafted:,}",
                f"{accepted:,}",
                f"{100 * accepted / drafted:.1f}%",
                ", ".join(
                    f"{100 * sum(at) / drafts:.0f}%" for at in zip(*(run.accepted_at for run in runs), strict=True)
                ),
                f"{1 + accepted / drafts:.2f}",
                f"{seconds / before:.2f} of the baseline's" if seconds and before and not drafting else "",
            )
            rows.append((f"{side}, {mode}, {caches}", *counts))
    head = ("", "drafted", "accepted", "rate", "by place", "tokens of a step with a draft", "time of a step")
    return [head, *rows] if rows else []


def _step_seconds(runs: Sequence[LoadRun]) -> float:
    """Mean seconds of a request's decoding step, which produces one token plus the accepted ones; 0.0: not measured."""
    steps = sum(run.output_tokens - run.completed - run.accepted for run in runs)
    return sum(run.decode_seconds for run in runs) / steps if steps > 0 else 0.0
