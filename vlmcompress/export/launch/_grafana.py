"""A Grafana dashboard of vLLM's Prometheus metrics, as JSON to import.

Names are those of vLLM 0.32 (`v1/metrics/loggers.py`): counters end in `_total`, histograms have `_bucket`, `_sum`
and `_count`. A test compares each of them with what a running server shows at `/metrics`.
"""

from __future__ import annotations

import json
from typing import Any

from vlmcompress.export.readers import LoadFacts

_MODEL = 'model_name="$model"'
_WIDTH, _HEIGHT = 8, 8  # of a panel; the grid is 24 wide
_Panel = tuple[str, str, dict[str, str]]


def dashboard(facts: LoadFacts) -> str:
    """The dashboard as JSON text, with the checkpoint's name preselected."""
    panels = [_panel(number, *panel) for number, panel in enumerate(_panels())]
    content = {
        "title": f"vLLM: {facts.name}",
        "uid": None,
        "tags": ["vllm", "vlmcompress"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables(facts.name)},
        "panels": panels,
    }
    return json.dumps(content, indent=1) + "\n"


def _panels() -> list[_Panel]:
    """Title, unit, and legend -> PromQL of each panel."""
    reasons = f"sum by (finished_reason) ({_rate('request_success_total')})"
    hits = "sum({hits}) / clamp_min(sum({queries}), 1e-9)"
    return [
        ("Requests", "short", {"running": _sum("num_requests_running"), "waiting": _sum("num_requests_waiting")}),
        ("Finished requests by reason", "reqps", {"{{finished_reason}}": reasons}),
        ("Preemptions", "ops", {"preempted": f"sum({_rate('num_preemptions_total')})"}),
        ("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
        ("Time between tokens", "s", _quantiles("inter_token_latency_seconds")),
        ("Time per output token, by request", "s", _quantiles("request_time_per_output_token_seconds")),
        ("End-to-end latency", "s", _quantiles("e2e_request_latency_seconds")),
        ("Time in the queue", "s", _quantiles("request_queue_time_seconds")),
        ("Prefill time", "s", _quantiles("request_prefill_time_seconds")),
        (
            "Tokens",
            "short",
            {"prompt": f"sum({_rate('prompt_tokens_total')})", "output": f"sum({_rate('generation_tokens_total')})"},
        ),
        ("Prompt tokens of a request", "short", _quantiles("request_prompt_tokens")),
        ("KV cache in use", "percentunit", {"used": f"avg({_metric('kv_cache_usage_perc')})"}),
        (
            "Prefix cache: tokens found",
            "percentunit",
            {"found": hits.format(hits=_rate("prefix_cache_hits_total"), queries=_rate("prefix_cache_queries_total"))},
        ),
        (
            "Multimodal cache: items found",
            "percentunit",
            {"found": hits.format(hits=_rate("mm_cache_hits_total"), queries=_rate("mm_cache_queries_total"))},
        ),
        ("Tokens in a step", "short", _quantiles("iteration_tokens_total")),
    ]


def _metric(name: str) -> str:
    return f"vllm:{name}{{{_MODEL}}}"


def _rate(name: str) -> str:
    return f"rate({_metric(name)}[$__rate_interval])"


def _sum(name: str) -> str:
    return f"sum({_metric(name)})"


def _quantiles(histogram: str) -> dict[str, str]:
    buckets = f"sum by (le) ({_rate(histogram + '_bucket')})"
    quantiles = {f"p{100 * q:.0f}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.9, 0.99)}
    mean = f"sum({_rate(histogram + '_sum')}) / clamp_min(sum({_rate(histogram + '_count')}), 1e-9)"
    return {**quantiles, "mean": mean}


def _panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    across = 24 // _WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": _WIDTH * (number % across), "y": _HEIGHT * (number // across)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": source, "expr": query, "legendFormat": legend}
            for at, (legend, query) in enumerate(queries.items())
        ],
    }


def _variables(name: str) -> list[dict[str, Any]]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": source,
            "query": "label_values(vllm:num_requests_running, model_name)",
            "refresh": 2,
            "current": {"text": name, "value": name},
        },
    ]
