"""Render `report.html`: the templates beside this file, filled with a comparison's results and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from vlmcompress.common.text import figures, percentage, points, size, smaller, times
from vlmcompress.report import examples, findings, making, words
from vlmcompress.report.charts import curves, heatmap, intervals
from vlmcompress.report.markdown import about
from vlmcompress.results import Bench, Ratio, Results, Scored, Side, Suite

_FOLDER = Path(__file__).parent
_SHOWN = 24  # examples
_LAYERS = 5  # rows in the table of errors that is open
_PANELS = {"ttft_ms": "Time to first token", "itl_ms": "Time between tokens", "e2e_ms": "Time to last token"}


def page(results: Results) -> str:
    """Render the whole page."""
    found = examples.changed(results.samples)
    return render(
        "report.html.j2",
        r=results,
        verdict=findings.overall(results),
        headline=findings.headline(results),
        glossary=findings.glossary(results),
        overview=_overview(results) if len(results.suites) > 1 else None,
        suites=[_suite(suite, results) for suite in results.suites],
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
        made=making.rows(results.candidate),
        rules=findings.rules(results.gate) if results.gate else [],
        method=findings.method(results),
        about=about(results),
    )


def render(template: str, **values: Any) -> str:
    """Render a template with the style sheet in it; text is escaped, charts are markup already."""
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
    named = (
        points,
        words.percent,
        words.metric,
        words.error_kind,
        words.typeset,
        size,
        figures,
        percentage,
        times,
        dotted,
    )
    environment.filters |= {filter_.__name__: filter_ for filter_ in named}
    environment.filters["tick"] = lambda verdict: words.VERDICTS[verdict]
    environment.globals["smaller"] = smaller
    return environment


def dotted(name: str) -> Markup:
    """Mark up a layer's name so that lines may break after its dots, and nowhere else."""
    return Markup(".<wbr>").join(escape(part) for part in name.split("."))


def _overview(results: Results) -> dict[str, Any]:
    rows = [findings.rows(suite, results.gate)[0]._replace(name=suite.name) for suite in results.suites]
    return drawn(rows)


def drawn(rows: Sequence[findings.Row]) -> dict[str, Any]:
    """Draw a chart for each row; returns them with the axis that they share."""
    axis = intervals.accuracy_axis(rows)
    return {"ruler": intervals.ruler(axis), "rows": [(row, intervals.accuracy(row, axis)) for row in rows]}


def _suite(suite: Suite, results: Results) -> dict[str, Any]:
    """Collect the values for a suite's section."""
    rows = findings.rows(suite, results.gate)
    own = [sample for sample in results.samples if sample.suite == suite.name]
    panels = []
    tokens = {"baseline": [s.baseline_tokens for s in own], "candidate": [s.candidate_tokens for s in own]}
    if own and any(tokens["baseline"]):
        panels.append(("Prompt tokens, images included", curves.histogram("Prompt tokens", "tokens", tokens)))
    if moved := [s.kl for s in own if s.kl is not None]:
        chart = curves.cumulative("First-token divergence", "nats", {"candidate": [moved]})
        panels.append(("Divergence of the first token (KL)", chart))
    return {
        "suite": suite,
        **drawn(rows),
        "overall": rows[0].found,
        "fallen": findings.fallen(suite, results.gate),
        "panels": [(title, chart) for title, chart in panels if chart],
    }


def _speed(bench: Bench) -> list[dict[str, Any]]:
    """Collect a table of speed for each mode and state."""
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
    """Draw distributions of latencies as clients saw them, for served runs only."""
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
    errors = side.layer_errors
    grids = heatmap.grids(errors)
    scale = heatmap.extremes(grids)
    names = sorted(errors, key=lambda name: (-max(errors[name].values(), default=0.0), name))
    return {
        "about": findings.layers(errors),
        "grids": [(grid, heatmap.heatmap(grid, scale)) for grid in grids],
        "legend": heatmap.legend(scale),
        "kinds": list(dict.fromkeys(kind for found in errors.values() for kind in found)),
        "worst": names[:_LAYERS],
        "rest": names[_LAYERS:],
    }


def _pick(results: Results, found: list[Scored]) -> list[Scored]:
    """Choose examples, those with pictures first, as readers can judge these."""
    return sorted(found, key=lambda sample: (sample.id not in results.pictures, examples.kind(sample)))[:_SHOWN]
