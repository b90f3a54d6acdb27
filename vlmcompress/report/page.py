"""`report.html`: the templates beside this file, filled with a comparison's results and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from vlmcompress.report import examples, findings, words
from vlmcompress.report.charts import curves, heatmap, intervals
from vlmcompress.report.markdown import about
from vlmcompress.results import Bench, Comparison, Ratio, Results, Scored, Side, Suite

_FOLDER = Path(__file__).parent
_SHOWN = 24  # examples
_PANELS = {"ttft_ms": "Time to first token", "itl_ms": "Time between tokens", "e2e_ms": "Time to last token"}


def page(results: Results) -> str:
    """The whole page."""
    found = examples.changed(results.samples)
    return render(
        "report.html.j2",
        r=results,
        verdict=findings.overall(results),
        headline=findings.headline(results),
        overview=_overview(results.suites) if len(results.suites) > 1 else None,
        suites=[_suite(suite, results.samples) for suite in results.suites],
        speed=_speed(results.bench) if results.bench else [],
        latency=_latency(results.bench) if results.bench else [],
        memory=findings.memory(results),
        heat=_heat(results.candidate),
        changed=len(found),
        lost=sum(examples.kind(sample) == 0 for sample in found),
        examples=[
            (sample, [examples.thumbnail(png) for png in results.pictures.get(sample.id, [])])
            for sample in _pick(results, found)
        ],
        method=findings.method(results),
        about=about(results),
    )


def render(template: str, **values: Any) -> str:
    """A template with the style sheet in it; text is escaped, charts are markup already."""
    style = Markup(_FOLDER.joinpath("style.css").read_text(encoding="utf-8"))
    text = _environment().get_template(template).render(style=style, words=words, findings=findings, **values)
    return words.printable(text)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    filters = {name: getattr(words, name) for name in ("points", "percent", "size", "figures", "times", "metric")}
    environment.filters |= {**filters, "typeset": words.typeset, "tick": lambda v: words.VERDICTS[v]}
    return environment


def _overview(suites: Sequence[Suite]) -> dict[str, Any]:
    axis = intervals.accuracy_axis([suite.overall for suite in suites])
    rows = [(suite.name, suite.overall, intervals.accuracy(suite.overall, axis)) for suite in suites]
    return {"ruler": intervals.ruler(axis), "rows": rows}


def _suite(suite: Suite, samples: list[Scored]) -> dict[str, Any]:
    """What a suite's section shows."""
    rows: dict[str, Comparison] = {"all": suite.overall, **suite.families}
    axis = intervals.accuracy_axis(list(rows.values()))
    own = [sample for sample in samples if sample.suite == suite.name]
    panels = []
    tokens = {"baseline": [s.baseline_tokens for s in own], "candidate": [s.candidate_tokens for s in own]}
    if own and any(tokens["baseline"]):
        panels.append(("Prompt tokens, images included", curves.histogram("Prompt tokens", "tokens", tokens)))
    if moved := [s.kl for s in own if s.kl is not None]:
        chart = curves.cumulative("First-token divergence", "nats", {"candidate": [moved]})
        panels.append(("Divergence of the first token (KL)", chart))
    return {
        "suite": suite,
        "ruler": intervals.ruler(axis),
        "rows": [(name, c, intervals.accuracy(c, axis)) for name, c in rows.items()],
        "panels": [(title, chart) for title, chart in panels if chart],
    }


def _speed(bench: Bench) -> list[dict[str, Any]]:
    """A table a mode and state."""
    every: list[Ratio] = [
        r for states in bench.summary.values() for metrics in states.values() for r in metrics.values()
    ]
    axis = intervals.gain_axis(every) if every else None
    return [
        {
            "mode": mode,
            "state": state,
            "ruler": intervals.ruler(axis, "times"),
            "rows": [(name, r, intervals.gain(name, r, axis)) for name, r in metrics.items()],
        }
        for mode, states in bench.summary.items()
        for state, metrics in states.items()
        if axis
    ]


def _latency(bench: Bench) -> list[tuple[str, Markup]]:
    """Distributions of what clients waited for, served runs only."""
    panels = []
    for state in ("cold", "warm"):
        runs = [run for run in bench.runs if run.mode == "serve" and run.state == state]
        for name, title in _PANELS.items():
            sides: Mapping[str, list[list[float]]] = {
                side: [getattr(run, name) for run in runs if run.side == side and getattr(run, name)]
                for side in ("baseline", "candidate")
            }
            if all(sides.values()):
                panels.append((f"{title}, {state}", curves.cumulative(f"{title}, {state}", "ms", sides)))
    return panels


def _heat(side: Side) -> dict[str, Any]:
    grids = heatmap.grids(side.layer_errors)
    scale = heatmap.extremes(grids)
    worst = sorted(((e, n, m) for n, found in side.layer_errors.items() for m, e in found.items()), reverse=True)
    return {"grids": [(g, heatmap.heatmap(g, scale)) for g in grids], "scale": scale, "worst": worst[:5]}


def _pick(results: Results, found: list[Scored]) -> list[Scored]:
    """Those with pictures first: they are what one can judge."""
    return sorted(found, key=lambda sample: (sample.id not in results.pictures, examples.kind(sample)))[:_SHOWN]
