"""The page of `vlmcompress report-error`: a heat map for each modality, of two checkpoints before, after and the change."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from vlmcompress.diagnosis import layer_errors
from vlmcompress.diagnosis.layer_errors import LayerErrors
from vlmcompress.report import error_text, findings
from vlmcompress.report.charts import heatmap
from vlmcompress.report.charts.heatmap import Grid
from vlmcompress.report.page import render

_WORST = 20  # layers in the table that is open


def page(first: LayerErrors, other: LayerErrors | None = None) -> str:
    """Render the whole page."""
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
        measure=findings.layers({name: error for one in both for name, error in one.errors.items()}),
        summaries=[layer_errors.summary(one) for one in both],
        changed=changed,
        verdict=error_text.verdict,
        differences=[] if other is None else layer_errors.differences(first, other),
        panels=_panels(grids, scale, most),
        legend=heatmap.legend(scale),
        change_legend=heatmap.change_legend(most),
        kinds=kinds,
        caches=[(one.name, error_text.cache(one)) for one in both if one.kv_cache],
        worst=layer_errors.worst_first(*both)[:_WORST],
        rest=layer_errors.worst_first(*both)[_WORST:],
        errors=[one.errors for one in both],
    )


def _key(grid: Grid) -> tuple[str, str]:
    return grid.part, grid.modality


def _panels(grids: list[dict[tuple[str, str], Grid]], scale: tuple[float, float], most: float) -> list[dict[str, Any]]:
    """List, for each part and modality, its grid and the drawings with their captions."""
    found = []
    for key, grid in grids[0].items():
        charts: list[tuple[str, Markup]] = [("", heatmap.heatmap(grid, scale))]
        if after := (grids[1].get(key) if len(grids) > 1 else None):
            charts = [
                ("before", heatmap.heatmap(grid, scale)),
                ("after", heatmap.heatmap(after, scale)),
                ("change", heatmap.changes(grid, after, most)),
            ]
        found.append({"grid": grid, "charts": [chart for chart in charts if chart[1]]})
    return found
