"""The page of `vlmcompress report-error`: a heat map for each modality, of two checkpoints before, after and the change."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from vlmcompress.diagnosis import layer_errors
from vlmcompress.diagnosis.layer_errors import LayerErrors
from vlmcompress.report import error_text
from vlmcompress.report.charts import heatmap
from vlmcompress.report.charts.heatmap import Grid
from vlmcompress.report.page import render

_WORST = 20  # layers in the table


def page(first: LayerErrors, other: LayerErrors | None = None) -> str:
    """The whole page."""
    both = [one for one in (first, other) if one is not None]
    kinds = layer_errors.kinds(*both)
    changed = {} if other is None else layer_errors.change(first, other)
    grids = [{_key(grid): grid for grid in heatmap.grids(one.errors) if grid.modality in kinds} for one in both]
    scale = heatmap.extremes([grid for found in grids for grid in found.values()])
    pairs = [(grids[0][key], grids[1][key]) for key in grids[0] if key in grids[1]] if other else []
    most = heatmap.largest_change(pairs)
    return render(
        "errors.html.j2",
        checkpoints=both,
        measure=error_text.MEASURE if any(one.basis for one in both) else error_text.OF_WEIGHTS,
        summaries=[layer_errors.summary(one) for one in both],
        changed=changed,
        verdict=error_text.verdict,
        label=error_text.label,
        percent=error_text.percent,
        differences=[] if other is None else layer_errors.differences(first, other),
        panels=_panels(grids, scale, most),
        scale=scale,
        most=most,
        kinds=kinds,
        caches=[(one.name, error_text.cache(one)) for one in both if one.kv_cache],
        worst=layer_errors.worst_first(*both)[:_WORST],
        count=len({name for one in both for name in one.errors}),
    )


def _key(grid: Grid) -> tuple[str, str]:
    return grid.part, grid.modality


def _panels(grids: list[dict[tuple[str, str], Grid]], scale: tuple[float, float], most: float) -> list[dict[str, Any]]:
    """For each part and modality: its title, and what to draw with a caption each."""
    found = []
    for key, grid in grids[0].items():
        charts: list[tuple[str, Markup]] = [("", heatmap.heatmap(grid, scale))]
        if after := (grids[1].get(key) if len(grids) > 1 else None):
            charts = [
                ("before", heatmap.heatmap(grid, scale)),
                ("after", heatmap.heatmap(after, scale)),
                ("change", heatmap.changes(grid, after, most)),
            ]
        found.append({"title": grid.title, "wide": grid.wide, "charts": [chart for chart in charts if chart[1]]})
    return found
