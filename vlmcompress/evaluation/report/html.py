"""A document as one page of HTML, filled into `page.html.j2`: style, charts and pictures are embedded, and it has no script."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

import jinja2
from markupsafe import Markup
from PIL import Image, ImageDraw

from vlmcompress.evaluation.accuracy.grounding import region
from vlmcompress.evaluation.report import sections, words
from vlmcompress.evaluation.report.document import Cell, Section, verdict_cell
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.results import Verdict
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import error_text
from vlmcompress.utils.text import points, size, smaller

THUMBNAIL = 360  # pixels
OUTLINES = {"expected": "#12a150", "baseline": "#2563eb", "candidate": "#dc2626"}  # of boxes drawn on pictures
_FOLDER = Path(__file__).parent


def report_page(findings: Findings) -> str:
    """The content of `report.html`."""
    results = findings.results
    candidate, baseline = results.candidate.name, results.baseline.name
    return page(
        f"{candidate} against {baseline}",
        findings.headline,
        sections.all_sections(findings),
        heading=Markup('{} <span class="dim">against {}</span>').format(candidate, baseline),
        verdict=findings.verdict,
        notes=[words.glossary(results)],
        tiles=_tiles(findings),
    )


def page(
    title: str,
    headline: Sequence[str],
    content: Sequence[Section],
    *,
    heading: str = "",
    eyebrow: str = "What compression cost and what it won",
    verdict: Verdict | None = None,
    notes: Sequence[str] = (),
    tiles: Sequence[tuple[str, str, str]] = (),
) -> str:
    """A page; all text is escaped.

    Args:
        heading: what it shows instead of the title.
        eyebrow: the line above it.
        verdict: colours the headline.
        notes: lines in small print below the headline.
        tiles: the main figures: value, what it is, and its tone.
    """
    style = Markup(_FOLDER.joinpath("style.css").read_text(encoding="utf-8"))
    full_title = f"{title}: {words.VERDICTS[verdict]}" if verdict else title
    variables = {"heading": heading or title, "eyebrow": eyebrow, "verdict": verdict, "notes": notes, "tiles": tiles}
    text = _template().render(
        title=full_title, headline=headline, sections=content, style=style, outlines=OUTLINES, **variables
    )
    return words.printable(text)


def _tiles(findings: Findings) -> list[tuple[str, str, str]]:
    """The main figures: value, what it is, and its tone."""
    results = findings.results
    tiles: list[tuple[str, str, str]] = []
    if findings.suites:
        lowest = min(findings.suites, key=lambda s: s.overall.difference)
        suite, c = lowest.suite, lowest.overall
        of_several = f", the lowest of {len(findings.suites)}" if len(findings.suites) > 1 else ""
        scores = f"{words.percent(c.baseline)} before, {words.percent(c.candidate)} after"
        tone = c.verdict if c.verdict != "pass" else ""
        tiles.append((f"{points(c.difference)} points", f"accuracy on {suite.name}{of_several}: {scores}", tone))
        tiles.append((words.percent(suite.agreement), f"same answer from both on {suite.name}", ""))
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    if before and after:
        tiles.append((smaller(before, after), f"weights: {size(before)} before, {size(after)} after", ""))
    if findings.main_speed:
        tiles.append((words.pace(findings.main_speed[1]), findings.main_speed[0], ""))
    else:
        tiles.append(("speed?", "not measured; vlmcompress bench does it", ""))
    return tiles


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
    drawn = {side: place for side, text in regions.items() if (place := region(text))}
    if not drawn and max(image.size) <= THUMBNAIL:
        return f"data:image/png;base64,{png}", max(image.size) <= THUMBNAIL // 2
    picture = image.convert("RGB")
    if drawn:
        scale = max(1, THUMBNAIL // max(image.size))
        picture = picture.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
        pen = ImageDraw.Draw(picture)
        for side, place in drawn.items():
            x, y, *far = (share * picture.size[axis % 2] for axis, share in enumerate(place))
            # A point is a small square; an inverted box, which has no area, is drawn all the same.
            x2, y2 = far or (x + 4, y + 4)
            pen.rectangle((min(x, x2), min(y, y2), max(x, x2), max(y, y2)), outline=OUTLINES[side], width=2)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    kind = "png" if drawn else "jpeg"
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}", False


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["percent"] = words.percent
    environment.filters["typeset"] = lambda cell: cell if isinstance(cell, Cell) else words.typeset(str(cell))
    environment.filters["pill"] = verdict_cell
    environment.filters["thumbnail"] = thumbnail
    environment.tests["chart"] = lambda cell: isinstance(cell, Cell) and not cell
    return environment.get_template("page.html.j2")
