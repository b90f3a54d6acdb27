"""The files of `vlmcompress search` and `auto`: a page, the Pareto plot and the data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlmcompress.common.folders import dump, save
from vlmcompress.common.text import duration, points, times
from vlmcompress.report import search_text
from vlmcompress.report.charts.front import front
from vlmcompress.report.charts.plot import PAGE, Frame, both
from vlmcompress.report.page import render
from vlmcompress.search.outcome import FILE
from vlmcompress.search.speed import GOALS


def page(data: Mapping[str, Any]) -> str:
    """Render the whole page of what `search.outcome.plain` describes."""
    return render(
        "search.html.j2",
        data=data,
        chart=both(partial(_chart, data)),
        confirmed=data.get("confirmed"),
        headline=search_text.headline(data),
        verdict=search_text.verdict(data),
        notes=search_text.notes(data),
        rows=[_row(one) for one in data["candidates"]],
        goal=GOALS[data["optimize"]],
        duration=duration,
    )


def _chart(data: Mapping[str, Any], frame: Frame = PAGE) -> Markup:
    return front(data["candidates"], data["max_drop"], GOALS[data["optimize"]], data.get("confirmed"), frame)


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    asked = one["questions"]
    interval = f"{points(one['difference'])} ({points(one['low'])} to {points(one['high'])})" if asked else ""
    return {
        "name": one["name"],
        "gain": times(one["gain"]) + ("~" if one["rough"] else ""),
        "questions": asked or "",
        "difference": interval,
        "divergence": "" if one["divergence"] is None else f"{one['divergence']:.4f}",
        "chance": f"{100 * one['chance']:.0f}%",
        "why": "winner" if one["winner"] else one["why"],
        "strong": one["winner"],
    }


def write(data: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Write `report.html`, `pareto.svg` and `search.json` into the folder of a search; kind -> path."""
    chart = _chart(data)
    files: dict[str, tuple[str, str | bytes]] = {"json": (FILE, dump(data)), "html": ("report.html", page(data))}
    return save(folder, files | ({"plot": ("pareto.svg", f"{chart}\n")} if chart else {}))
