"""Compute figures from single requests, and ratios of the two sides from repeats.

A figure of a side is its median over the repeats. A comparison is the median of the repeats' gains (`results.Ratio`), as the
two runs of a repeat were adjacent in time; the smallest and the largest show the spread.

Whether a side is faster is judged by the 95% interval of the mean of the ratios' logarithms, Student's t of the repeats:
mean +- t s / sqrt(n). Three repeats fall on the same side by chance in 1 case of 4, so that their extremes would not suffice;
this interval excludes 1 by chance in 1 case of 20, half of them on each side. One repeat has no interval.

Tokens per second of prompt and output together are left out on purpose: a model with fewer visual tokens per image would look
slower for the same work. Its gain is in requests per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Literal

import numpy as np

from vlmcompress.evaluation.results import LoadRun, Ratio
from vlmcompress.evaluation.speed.client import Outcome
from vlmcompress.evaluation.speed.counters import Counters
from vlmcompress.utils.errors import UserError, did_you_mean

TIMES = ("ttft", "tpot", "itl", "e2e")
_LIMITED = ("ttft", "tpot", "e2e")
PERCENTILES = (50, 90, 99)


def parse_slo(text: str | None) -> dict[str, float]:
    """Parse limits like `ttft=200,tpot=50` (and `e2e`), in milliseconds, to `{"ttft": 200.0, "tpot": 50.0}`.

    Raises:
        UserError: an unknown name or a limit that is not above zero.
    """
    limits: dict[str, float] = {}
    for item in [] if text is None else text.split(","):
        name, _, value = item.strip().partition("=")
        if name not in _LIMITED:
            raise UserError(
                f"--slo {item.strip()}: no time '{name}'{did_you_mean(name, _LIMITED)}; e.g. ttft=200,tpot=50"
            )
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if not 0 < limits[name] < float("inf"):
            raise UserError(f"--slo {item.strip()}: '{value}' should be milliseconds above 0; e.g. ttft=200,tpot=50")
    return limits


def burst_record(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    side: Literal["baseline", "candidate"],
    repeat: int,
    slo: Mapping[str, float],
    counters: Counters,
) -> LoadRun:
    """Summarize one burst against a server as a `LoadRun`; nothing is run. Times are those of answered requests.

    Args:
        outcomes: one for each request, answered or failed.
        side, repeat: copied into the record.
        duration: seconds from the first request to the last answer.
        slo: limits in milliseconds; goodput is requests per second within all limits (TPOT of one token: 0).
        counters: the server's counts during the burst.
    """
    good = [outcome for outcome in outcomes if not outcome.error]

    def keeps(outcome: Outcome) -> bool:
        times = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2e": outcome.e2e}
        return all(1000 * times[name] <= limit for name, limit in slo.items())

    visual = sum(outcome.visual_tokens for outcome in good)
    return LoadRun(
        side=side,
        mode="serve",
        state="cold",
        repeat=repeat,
        duration=duration,
        completed=len(good),
        failed=len(outcomes) - len(good),
        text_tokens=sum(outcome.prompt_tokens for outcome in good) - visual,
        visual_tokens=visual,
        output_tokens=sum(outcome.output_tokens for outcome in good),
        drafts=int(counters.drafts),
        drafted=int(counters.drafted),
        accepted=int(counters.accepted),
        accepted_at=[int(count) for count in counters.accepted_at],
        decode_seconds=counters.decode_seconds,
        goodput=sum(map(keeps, good)) / duration if slo else None,
        ttft_ms=_milliseconds(outcome.ttft for outcome in good),
        tpot_ms=_milliseconds(outcome.tpot for outcome in good if outcome.tpot is not None),
        itl_ms=_milliseconds(gap for outcome in good for gap in outcome.itl),
        e2e_ms=_milliseconds(outcome.e2e for outcome in good),
    )


def figures(run: LoadRun) -> dict[str, float]:
    """Compute a run's figures by name: `request_throughput`, `output_throughput`, `goodput` (per second), `ttft_p50_ms`, ..."""
    by_name = {
        "request_throughput": run.completed / run.duration,
        "output_throughput": run.output_tokens / run.duration,
    }
    if run.goodput is not None:
        by_name["goodput"] = run.goodput
    for name in TIMES:
        values = getattr(run, f"{name}_ms")
        if values:
            by_name |= {f"{name}_p{p}_ms": float(np.percentile(values, p)) for p in PERCENTILES}
    return by_name


def summarise(runs: Sequence[LoadRun]) -> dict[str, dict[str, dict[str, Ratio]]]:
    """Compare the sides over the repeats that both have: `summary[mode][state][figure]`."""
    summary: dict[str, dict[str, dict[str, Ratio]]] = {}
    for mode, state in dict.fromkeys((run.mode, run.state) for run in runs):
        sides = {
            side: {r.repeat: figures(r) for r in runs if (r.mode, r.state, r.side) == (mode, state, side)}
            for side in ("baseline", "candidate")
        }
        repeats = sorted(sides["baseline"].keys() & sides["candidate"].keys())
        pairs = [(sides["baseline"][repeat], sides["candidate"][repeat]) for repeat in repeats]
        ratios = {name: ratio(name, pairs) for name in (pairs[0][0] if pairs else {})}
        summary.setdefault(mode, {})[state] = {name: compared for name, compared in ratios.items() if compared}
    return summary


def ratio(name: str, pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> Ratio | None:
    """Compare one figure, from (baseline, candidate) of each repeat; None if one lacks it, or has 0 where it is divided by."""
    higher = not name.endswith("_ms")
    if not all(before.get(name) and (name in after if higher else after.get(name)) for before, after in pairs):
        return None
    gains = [after[name] / before[name] if higher else before[name] / after[name] for before, after in pairs]
    return Ratio(
        baseline=median(before[name] for before, _ in pairs),
        candidate=median(after[name] for _, after in pairs),
        gain=median(gains),
        low=min(gains),
        high=max(gains),
        higher_is_better=higher,
        interval=interval(gains),
        unit="ms" if name.endswith("_ms") else "tokens/s" if name == "output_throughput" else "requests/s",
    )


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """The 95% interval of the ratio, from those of the repeats; None for one repeat, or if one is 0 or infinite."""
    if len(ratios) < 2 or not all(0 < ratio < math.inf for ratio in ratios):
        return None
    from scipy.special import stdtrit  # a part of the extra `eval`; this file is imported without it

    logs = [math.log(ratio) for ratio in ratios]
    # Ratios are multiplicative, so the t interval is of their logarithms, and its ends are exponentials.
    reach = stdtrit(len(logs) - 1, 0.975) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(fmean(logs) - reach), math.exp(fmean(logs) + reach)


def _milliseconds(seconds: Iterable[float]) -> list[float]:
    return [round(1000 * value, 3) for value in seconds]


def requests_at_once(request_tokens: float, cache: Mapping[str, str]) -> float:
    """How many requests of so many tokens (prompt and output) vLLM's KV cache holds at once.

    Args:
        cache: vLLM's `cache_config_info` as text: `block_size` and `kv_cache_size_tokens`.
    """
    block = int(cache["block_size"])
    return round(int(cache["kv_cache_size_tokens"]) / (math.ceil(request_tokens / block) * block), 2)
