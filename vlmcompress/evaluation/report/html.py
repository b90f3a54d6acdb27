"""Findings as `report.html`: the templates next to this file, filled with findings, charts and pictures.

A page is self-contained: style, charts (inline SVG) and pictures (data URIs) are embedded, and it has no script.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from markupsafe import Markup, escape
from PIL import Image, ImageDraw

from vlmcompress.evaluation.accuracy.grounding import METRICS, region
from vlmcompress.evaluation.report import charts, heatmap, words
from vlmcompress.evaluation.report.findings import AccuracyRow, Findings, SuiteFindings
from vlmcompress.evaluation.results import Side
from vlmcompress.export.manifest import error_kind
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import error_text
from vlmcompress.utils.text import figures, percentage, points, size, smaller, times

THUMBNAIL = 360  # pixels
OUTLINES = {"expected": "#12a150", "baseline": "#2563eb", "candidate": "#dc2626"}  # of boxes drawn on pictures
_FOLDER = Path(__file__).parent
_EXAMPLES = 24  # samples shown
_LAYERS = 5  # rows of the open table of errors
_LATENCIES = {"ttft_ms": "Time to first token", "itl_ms": "Time between tokens", "e2e_ms": "Time to last token"}


def report_page(findings: Findings) -> str:
    """The content of `report.html`."""
    results, bench = findings.results, findings.results.bench
    ratios = [ratio for table in findings.speed for ratio in table.metrics.values()]
    axis = charts.gain_axis(ratios) if ratios else None
    overview = [s.rows[0]._replace(name=s.suite.name) for s in findings.suites]
    # samples with pictures first, as readers can judge them
    examples = sorted(findings.changed, key=lambda sample: (sample.id not in results.pictures, sample.change))[
        :_EXAMPLES
    ]
    # pixels are of a picture whose size is not known here, so that their boxes are not drawn
    about_boxes = {s.name for s in results.suites if s.metric in METRICS and not s.name.endswith("_pixels")}
    panels = []  # client-side latencies of served runs
    for state, (name, what) in product(("cold", "warm"), _LATENCIES.items()):
        sides: dict[str, list[list[float]]] = {"baseline": [], "candidate": []}
        for run in bench.runs if bench else ():
            if run.mode == "serve" and run.state == state and getattr(run, name):
                sides[run.side].append(getattr(run, name))
        if all(sides.values()):
            panels.append((f"{what}, {state}", charts.cumulative(f"{what}, {state}", "ms", sides)))
    return fill_template(
        "report.html.j2",
        f=findings,
        r=results,
        overview=accuracy_rows(overview) if len(overview) > 1 else None,
        suites=[(s, accuracy_rows(s.rows), _panels(s)) for s in findings.suites],
        lowest=min(findings.suites, key=lambda s: s.overall.difference, default=None),
        speed=[
            (table, charts.ruler(axis, "times"), {n: charts.gain_chart(n, r, axis) for n, r in table.metrics.items()})
            for table in findings.speed
            if axis
        ],
        latency=panels,
        errors=_heat(results.candidate),
        examples=[
            (sample, sides, [thumbnail(png, sides) for png in results.pictures.get(sample.id, [])])
            for sample in examples
            for sides in [{side: getattr(sample, side) for side in OUTLINES} if sample.suite in about_boxes else {}]
        ],
        outlines=OUTLINES,
    )


def accuracy_rows(rows: Sequence[AccuracyRow]) -> dict[str, Any]:
    """Rows of accuracy, each with its chart, and the ruler of the axis that they share."""
    axis = charts.accuracy_axis(rows)
    return {"ruler": charts.ruler(axis), "rows": [(row, charts.accuracy(row, axis)) for row in rows]}


def _panels(s: SuiteFindings) -> list[tuple[str, Markup]]:
    """Charts of prompt tokens and of the first token's divergence, with their titles."""
    tokens = {side: [getattr(x, f"{side}_tokens") for x in s.samples] for side in ("baseline", "candidate")}
    divergences, panels = [sample.kl for sample in s.samples if sample.kl is not None], []
    if any(tokens["baseline"]):
        panels.append(("Prompt tokens, images included", charts.histogram("Prompt tokens", "tokens", tokens)))
    if drawn := charts.cumulative("First-token divergence", "nats", {"candidate": [divergences]}):
        panels.append(("Divergence of the first token (KL)", drawn))
    return panels


def _heat(side: Side) -> dict[str, Any]:
    """Heat maps of the errors of layers, their legend, and the layers from the worst."""
    errors = side.layer_errors
    grids = heatmap.grids(errors)
    scale = heatmap.extremes(grids)
    names = sorted(errors, key=lambda name: (-max(errors[name].values(), default=0.0), name))
    return {
        "grids": [(grid, heatmap.errors(grid, scale)) for grid in grids],
        "legend": heatmap.legend(scale),
        "kinds": list(dict.fromkeys(kind for by_kind in errors.values() for kind in by_kind)),
        "worst": names[:_LAYERS],
        "rest": names[_LAYERS:],
    }


def thumbnail(png: str, regions: Mapping[str, str] = MappingProxyType({})) -> tuple[str, bool]:
    """A base64 PNG as data URI (large ones are shrunk to JPEG), and whether it is small.

    Args:
        regions: key of `OUTLINES` -> text, whose box or point is drawn on the picture.

    Raises:
        UserError: not a PNG.
    """
    try:
        image = Image.open(io.BytesIO(base64.b64decode(png)), formats=["PNG"])
        image.load()
    except Exception as error:  # decoders raise anything on damaged data
        raise UserError(
            f"results have a picture that is not a PNG ({error_text(error)}); write the report again"
        ) from error
    with image:
        drawn = {side: place for side, text in regions.items() if (place := region(text))}
        if drawn:
            scale = max(1, THUMBNAIL // max(image.size))
            picture = image.convert("RGB").resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
            pen = ImageDraw.Draw(picture)
            for side, place in drawn.items():
                x, y, *far = (share * picture.size[axis % 2] for axis, share in enumerate(place))
                # A point is a small square; an inverted box, which has no area, is drawn all the same.
                x2, y2 = far or (x + 4, y + 4)
                pen.rectangle((min(x, x2), min(y, y2), max(x, x2), max(y, y2)), outline=OUTLINES[side], width=2)
            picture.thumbnail((THUMBNAIL, THUMBNAIL))
            buffer = io.BytesIO()
            picture.save(buffer, "PNG")
            return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}", False
        if max(image.size) <= THUMBNAIL:
            return f"data:image/png;base64,{png}", max(image.size) <= THUMBNAIL // 2
        small = image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}", False


def fill_template(template: str, **variables: Any) -> str:
    """A rendered template with the style sheet; text is escaped, charts are already markup."""
    style = Markup(_FOLDER.joinpath("style.css").read_text(encoding="utf-8"))
    return words.printable(_environment().get_template(template).render(style=style, words=words, **variables))


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(_FOLDER)
    look: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, **look)
    for filter_ in (
        points,
        words.percent,
        words.metric_name,
        error_kind,
        words.typeset,
        size,
        figures,
        percentage,
        times,
    ):
        environment.filters[filter_.__name__] = filter_
    environment.filters["dotted"] = lambda name: Markup(".<wbr>").join(escape(part) for part in name.split("."))
    environment.filters["tick"] = lambda verdict: words.VERDICTS[verdict]
    environment.globals["smaller"] = smaller
    return environment
