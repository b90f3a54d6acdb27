"""A Grafana dashboard of vLLM's Prometheus metrics, as JSON to import.

Names are those of vLLM 0.32 (`v1/metrics/loggers.py`): counters end in `_total`, histograms have `_bucket`, `_sum`
and `_count`. A test compares each of them with what a running server shows at `/metrics`.
"""

from __future__ import annotations

import json
from typing import Any

from vlmcompress.export.readers import LoadFacts

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _metric(name: str) -> str:
    return f'vllm:{name}{{model_name="$model"}}'


def _rate(name: str) -> str:
    return f"rate({_metric(name)}[$__rate_interval])"


def _quantiles(histogram: str) -> dict[str, str]:
    buckets = f"sum by (le) ({_rate(histogram + '_bucket')})"
    quantiles = {f"p{100 * q:.0f}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.9, 0.99)}
    mean = f"sum({_rate(histogram + '_sum')}) / clamp_min(sum({_rate(histogram + '_count')}), 1e-9)"
    return {**quantiles, "mean": mean}


def _share(cache: str) -> dict[str, str]:
    return {"found": f"sum({_rate(f'{cache}_hits_total')}) / clamp_min(sum({_rate(f'{cache}_queries_total')}), 1e-9)"}


_WAITING = {name: f"sum({_metric(f'num_requests_{name}')})" for name in ("running", "waiting")}
_TOKENS = {"prompt": f"sum({_rate('prompt_tokens_total')})", "output": f"sum({_rate('generation_tokens_total')})"}
_REASONS = {"{{finished_reason}}": f"sum by (finished_reason) ({_rate('request_success_total')})"}
_PANELS = (  # title, unit, legend -> PromQL
    ("Requests", "short", _WAITING),
    ("Finished requests by reason", "reqps", _REASONS),
    ("Preemptions", "ops", {"preempted": f"sum({_rate('num_preemptions_total')})"}),
    ("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
    ("Time between tokens", "s", _quantiles("inter_token_latency_seconds")),
    ("Time per output token, by request", "s", _quantiles("request_time_per_output_token_seconds")),
    ("End-to-end latency", "s", _quantiles("e2e_request_latency_seconds")),
    ("Time in the queue", "s", _quantiles("request_queue_time_seconds")),
    ("Prefill time", "s", _quantiles("request_prefill_time_seconds")),
    ("Tokens", "short", _TOKENS),
    ("Prompt tokens of a request", "short", _quantiles("request_prompt_tokens")),
    ("KV cache in use", "percentunit", {"used": f"avg({_metric('kv_cache_usage_perc')})"}),
    ("Prefix cache: tokens found", "percentunit", _share("prefix_cache")),
    ("Multimodal cache: items found", "percentunit", _share("mm_cache")),
    ("Tokens in a step", "short", _quantiles("iteration_tokens_total")),
)


def dashboard(facts: LoadFacts) -> str:
    """The dashboard as JSON text, with the checkpoint's name preselected."""
    model: dict[str, Any] = {"name": "model", "label": "Model", "type": "query", "datasource": _SOURCE}
    model |= {"query": "label_values(vllm:num_requests_running, model_name)", "refresh": 2}
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    content = {
        "title": f"vLLM: {facts.name}",
        "uid": None,
        "tags": ["vllm", "vlmcompress"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, {**model, "current": {"text": facts.name, "value": facts.name}}]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(_PANELS)],
    }
    return json.dumps(content, indent=1) + "\n"


def _panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"h": 8, "w": 8, "x": 8 * (number % 3), "y": 8 * (number // 3)},  # the grid is 24 wide
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for at, (legend, query) in enumerate(queries.items())
        ],
    }
