"""Compute figures and tables from the output of `bench_serving.py`: for each group `rows` and when they were measured.

A figure of a variant is its median over the turns (TTFT: its percentile over the requests of all turns); a ratio is the median
over turns of that to the group's first variant, the full model in BF16, in the same turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

Row = Mapping[str, Any]
FULL = "bf16 full"
ABOUT = ("created", "version", "machine", "layers", "seconds")
SHOWN = ("cold", "quantized")  # groups of the docs' table


def summarise(results: Mapping[str, Any]) -> dict[str, Any]:
    """Compute `{group: {load: {variant: figures}}}`, and the parts of prefill that no reducer saves and that one takes
    itself."""
    summary: dict[str, Any] = {}
    for group, record in results.items():
        for load in dict.fromkeys(row["load"] for row in record["rows"]):
            rows = [row for row in record["rows"] if row["load"] == load]
            variants = dict.fromkeys(row["variant"] for row in rows)
            summary.setdefault(group, {})[load] = {variant: _figures(rows, variant) for variant in variants}
    about = {group: {name: record[name] for name in ABOUT} for group, record in results.items()}
    return {
        "groups": summary,
        **(_limits(results["cold"], summary["cold"]["latency"]) if "cold" in results else {}),
        "about": about,
    }


def _figures(rows: Sequence[Row], variant: str) -> dict[str, float]:
    turns = _by_turn(rows, variant)
    ttft = [value for row in turns.values() for value in row["ttft_ms"]]
    return {
        "visual_tokens": next(iter(turns.values()))["visual_tokens"],
        "cached": round(median(row["cached"] for row in turns.values()), 3),
        "requests": len(ttft),
        "clients": next(iter(turns.values()))["clients"],
        "request_throughput": round(median(row["request_throughput"] for row in turns.values()), 4),
        "throughput_ratio": round(_ratio(rows, variant, lambda row: row["request_throughput"]), 3),
        "ttft_p50_ms": round(float(np.percentile(ttft, 50)), 1),
        "ttft_p99_ms": round(float(np.percentile(ttft, 99)), 1),
        "ttft_ratio": round(_ratio(rows, variant, lambda row: median(row["ttft_ms"])), 3),
        "most_running": max(row["most_running"] for row in turns.values()),
        "fits": min(row["fits"] for row in turns.values()),
        "fits_ratio": round(_ratio(rows, variant, lambda row: row["fits"]), 2),
    }


def _by_turn(rows: Sequence[Row], variant: str) -> dict[int, Row]:
    return {row["turn"]: row for row in rows if row["variant"] == variant}


def _ratio(rows: Sequence[Row], variant: str, figure: Callable[[Row], float]) -> float:
    full, turns = _by_turn(rows, FULL), _by_turn(rows, variant)
    return median(figure(turns[turn]) / figure(full[turn]) for turn in turns)


def _limits(record: Mapping[str, Any], latency: Mapping[str, Any]) -> dict[str, Any]:
    """Compute from the cold group the floor's share of the full TTFT, and each reducer's own time as a share of the full
    prefill and of its own model's."""
    floor = next(figures for variant, figures in latency.items() if variant.startswith("bf16 uniform:"))
    by_reducer = {
        reduce: {
            "ms": round(ms, 2),
            "of_full": round(ms / latency[FULL]["ttft_p50_ms"], 4),
            "of_own": round(ms / latency[f"bf16 {reduce}"]["ttft_p50_ms"], 4),
        }
        for reduce, ms in record["reducer_ms"].items()
    }
    return {"floor": floor["ttft_ratio"], "reducer": by_reducer}


def render(results: Mapping[str, Any]) -> str:
    """Render the docs' table: a line a variant; ratios are to the full model in BF16 of its group."""
    summary = summarise(results)
    lines = ["| | visual tokens | TTFT, one client | of full | requests/s, 12 clients | of full | requests that fit |"]
    lines.append("|---|" + "---:|" * 6)
    for group in (group for group in SHOWN if {"latency", "load"} <= summary["groups"].get(group, {}).keys()):
        latency, load = summary["groups"][group]["latency"], summary["groups"][group]["load"]
        for variant, alone in latency.items():
            cells = [variant, str(alone["visual_tokens"]), f"{alone['ttft_p50_ms'] / 1000:.2f} s"]
            cells += [f"{alone['ttft_ratio']:.2f}", f"{load[variant]['request_throughput']:.2f}"]
            cells += [f"{load[variant]['throughput_ratio']:.2f}", f"{load[variant]['fits_ratio']:.1f} times"]
            lines.append("| " + " | ".join(cells) + " |")
    if again := summary["groups"].get("warm", {}).get("again"):
        ratios = ", ".join(f"{again[v]['throughput_ratio']:.2f} ({v})" for v in again if v != FULL)
        lines += ["", f"Where all was asked before and caches are on, requests/s of full: {ratios}."]
    if "floor" in summary:
        worst = max(share["of_own"] for share in summary["reducer"].values())
        lines += [
            "",
            f"With one visual token the time to first token is still {100 * summary['floor']:.0f}% of the full one: no reducer "
            f"saves that. Reducing takes at most {100 * worst:.1f}% of the reduced model's time to first token.",
        ]
    return "\n".join(lines)
