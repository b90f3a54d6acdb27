"""Findings as `report.html`: a list of sections, which `page.html.j2` fills in.

A page is self-contained: style, charts and pictures (data URIs) are embedded, and it has no script. A section is a mapping with
`id`, `title` and `parts`; a part is a mapping with its `kind`, made by the functions below `report_page`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from markupsafe import Markup, escape
from PIL import Image, ImageDraw

from vlmcompress.evaluation.accuracy.grounding import METRICS, region
from vlmcompress.evaluation.report import plots, words
from vlmcompress.evaluation.report.findings import AccuracyRow, Findings
from vlmcompress.evaluation.results import Verdict
from vlmcompress.export.manifest import error_kind
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import error_text
from vlmcompress.utils.text import figures, percentage, points, size, smaller

THUMBNAIL = 360  # pixels
OUTLINES = {"expected": "#12a150", "baseline": "#2563eb", "candidate": "#dc2626"}  # of boxes drawn on pictures
_FOLDER = Path(__file__).parent
_EXAMPLES = 24  # samples shown
_LAYERS = 5  # rows of the open table of errors
_SIGNS = {"pass": "\N{CHECK MARK}", "fail": "\N{BALLOT X}", "inconclusive": "?"}
_INTERVALS = (
    "Dots are differences in points, lines their intervals; the shaded region is beyond the margin, the loss that is allowed. "
    "An interval that stays out of it passes, one that reaches into it can't tell, one that lies in it fails."
)
Part = Mapping[str, Any]


def report_page(findings: Findings) -> str:
    """The content of `report.html`."""
    results = findings.results
    candidate, baseline = results.candidate.name, results.baseline.name
    sections = [
        *_gate(findings),
        *_accuracy(findings),
        *_speed(findings),
        section("memory", "Memory", table(["", "baseline", "candidate"], findings.memory)) if findings.memory else None,
        *_layers(findings),
        *_examples(findings),
        section(
            "made",
            f"How {candidate} was made",
            table(["", ""], findings.made, look="text facts"),
            name="How it was made",
        )
        if findings.made
        else None,
        section("method", "Method", {"kind": "list", "lines": findings.method}),
        section("again", "Do it again", {"kind": "code", "lines": findings.commands}),
    ]
    return fill_page(
        title=f"{candidate} against {baseline}" + (f": {words.VERDICTS[findings.verdict]}" if findings.verdict else ""),
        eyebrow="What compression cost and what it won",
        heading=Markup('{} <span class="dim">against {}</span>').format(candidate, baseline),
        verdict=findings.verdict,
        headline=findings.headline,
        notes=[words.glossary(results)],
        tiles=_tiles(findings),
        sections=[item for item in sections if item],
        footer=[
            findings.about,
            *(f"{suite.name}: {suite.source.rpartition('/')[2]} {suite.sha256[:12]}" for suite in results.suites),
        ],
    )


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
        tiles.append(("speed?", f"not measured; run {findings.bench_command}", ""))
    return tiles


def _gate(findings: Findings) -> list[Part]:
    if not (gate := findings.results.gate):
        return []
    rules = [(rule.name, pill(rule.verdict), rule.value, rule.limit, rule.reason) for rule in findings.rules]
    part = table(["rule", "verdict", "value", "limit", ""], rules, look="text cards")
    return [section("gate", f"{gate.title[:1].upper()}{gate.title[1:]}", part, mark=pill(gate.verdict), name="Gate")]


def _accuracy(findings: Findings) -> list[Part]:
    """An overview of several suites, and a section for each."""
    sections = []
    if len(findings.suites) > 1:
        overview = differences("suite", [s.rows[0]._replace(name=s.suite.name) for s in findings.suites])
        sections.append(section("accuracy", "Accuracy on all suites", *overview, name="Accuracy"))
    for s in findings.suites:
        parts = [text(words.verdict_text(s.overall)), *map(text, s.fallen), *differences("family", s.rows, strong=[0])]
        if any(not row.judged for row in s.rows):
            parts.append(note("Families without a verdict are not judged: no gate asks for it."))
        if s.overall.both is not None:
            o = s.overall
            shares = [
                ("right in both", o.both),
                ("lost", o.baseline_only),
                ("won", o.candidate_only),
                ("wrong in both", o.neither),
            ]
            parts += [heading("What became of the answers"), {"kind": "shares", "shares": shares}]
        suspect = [(what, f"{b:,}", strong(f"{c:,}", c > b)) for what, (b, c) in s.suspect]
        parts += [*map(text, s.notes), table(["suspect answers", "baseline", "candidate"], suspect, look="short")]
        name = {"id": "accuracy", "name": "Accuracy"} if len(findings.suites) == 1 else {"id": ""}
        title = Markup("Accuracy on {} <small>{}</small>").format(s.suite.name, s.suite.metric)
        sections.append(section(name.pop("id"), title, *parts, mark=pill(s.overall.verdict), **name))
    return sections


def differences(what: str, rows: Sequence[AccuracyRow], strong: Sequence[int] = ()) -> list[Part]:
    """A table of accuracy, with a chart in each row, and how to read it. `what`: what a row is."""
    axis, lines = plots.points_axis([row.comparison for row in rows]), []
    for name, c, judged in rows:
        interval = f"{points(c.low)} to {points(c.high)}"
        judgement = (f"{100 * c.margin:.1f}", pill(c.verdict)) if judged else ("", "")
        scores = (f"{c.n:,}", words.percent(c.baseline), words.percent(c.candidate), points(c.difference))
        lines.append((name, *scores, plots.accuracy(c, axis, judged=judged), interval, *judgement))
    level = f"{rows[0].comparison.level:.0%} interval"
    head = [what, "n", "before", "after", "points", plots.ruler(axis), level, "margin", "verdict"]
    return [table(head, lines, look="cards", strong=strong), note(_INTERVALS)]


def _speed(findings: Findings) -> list[Part]:
    bench = findings.results.bench
    if bench is None or not findings.speed:
        return []
    axis = plots.gain_axis([r for t in findings.speed for r in t.metrics.values()])
    sizes = f", images {', '.join(bench.sizes)}" if bench.sizes else ""
    load = words.load_text(bench)
    parts = [
        text(
            f"{load[:1].upper()}{load[1:]}, {bench.requests:,} requests a burst, {bench.out_tokens} output tokens each{sizes}."
        )
    ]
    for t in findings.speed:
        rows = [
            (
                words.metric_name(name),
                figures(r.baseline),
                figures(r.candidate),
                plots.gain(name, r, axis),
                words.pace(r),
            )
            for name, r in t.metrics.items()
        ]
        head = ["", "baseline", "candidate", plots.ruler(axis), "candidate is"]
        parts += [heading(f"{words.MODES[t.mode].capitalize()}, {t.state}"), table(head, rows, look="cards fixed")]
    legend = (
        "Right is better, for rates and for times. Dots are medians of the paired repeats, lines reach from the worst to the "
        "best, as far as the axis goes. "
        f"{words.TIMES}"
    )
    work = table(["", "baseline", "candidate"], findings.work, look="short")
    parts += [note(legend), heading("What was processed, counted by the server"), work]
    if findings.drafting:
        parts += [heading("Speculative decoding"), table(findings.drafting[0], findings.drafting[1:], look="cards")]
    return [section("speed", "Speed", *parts)]


def _layers(findings: Findings) -> list[Part]:
    """Errors of layers, the largest first."""
    errors = findings.results.candidate.layer_errors
    if not errors:
        return []
    kinds = list(dict.fromkeys(kind for by_kind in errors.values() for kind in by_kind))
    names = sorted(errors, key=lambda name: (-max(errors[name].values(), default=0.0), name))
    rows = [
        (dotted(name), *(percentage(errors[name][kind]) if kind in errors[name] else "" for kind in kinds))
        for name in names
    ]
    head = ["layer, the largest error first", *map(error_kind, kinds)]
    rest = rows[_LAYERS:]
    others = {"rest": table(head, rest, look="short"), "summary": f"The other {len(rest)} layers"} if rest else {}
    parts = note(words.layer_errors_text(errors)), {**table(head, rows[:_LAYERS], look="short"), **others}
    return [section("layers", "Error of each layer", *parts, name="Layers")]


def _examples(findings: Findings) -> list[Part]:
    """Samples with different answers, those with pictures first, as readers can judge them."""
    results = findings.results
    chosen = sorted(findings.changed, key=lambda sample: (sample.id not in results.pictures, sample.change))[:_EXAMPLES]
    if not chosen:
        return []
    # pixels are of a picture whose size is not known here, so that their boxes are not drawn
    about_boxes = {s.name for s in results.suites if s.metric in METRICS and not s.name.endswith("_pixels")}
    examples = []
    for sample in chosen:
        sides = {side: getattr(sample, side) for side in OUTLINES} if sample.suite in about_boxes else {}
        examples.append((sample, sides, [thumbnail(png, sides) for png in results.pictures.get(sample.id, [])]))
    lost = sum(sample.change == 0 for sample in findings.changed)
    counts = (
        f"{len(findings.changed):,} of {len(results.samples):,} samples, {lost:,} of them lost. {len(chosen)} shown, lost ones "
        "first; results.json has every answer."
    )
    return [
        section(
            "examples",
            "Where the answers differ",
            note(counts),
            {"kind": "examples", "examples": examples},
            name="Examples",
        )
    ]


def section(id_: str, title: str, *parts: Part, mark: str = "", name: str = "") -> Part:
    """A section; `mark` follows its title, `name` is its entry in the list of sections, by default its title."""
    return {"id": id_, "title": title, "parts": parts, "mark": mark, "name": name}


def table(head: Sequence[str], rows: Sequence[Sequence[str]], look: str = "", strong: Sequence[int] = ()) -> Part:
    """A table; `look` has classes of the style sheet, `strong` the numbers of its main rows. Texts get true minus signs."""
    typeset = [[cell if isinstance(cell, Markup) else words.typeset(str(cell)) for cell in row] for row in rows]
    return {"kind": "table", "head": head, "rows": typeset, "look": look, "strong": strong, "rest": None}


def text(line: str) -> Part:
    """A paragraph."""
    return {"kind": "text", "text": line}


def note(line: str) -> Part:
    """A paragraph in small print."""
    return {"kind": "note", "text": line}


def heading(line: str) -> Part:
    """A heading within a section."""
    return {"kind": "heading", "text": line}


def pill(verdict: Verdict) -> Markup:
    """A verdict with its sign, as markup."""
    return Markup('<span class="pill {}">{} {}</span>').format(verdict, _SIGNS[verdict], words.VERDICTS[verdict])


def strong(value: str, worse: bool = True) -> str:
    """A value that is highlighted if it is worse, as markup."""
    return Markup('<span class="worse">{}</span>').format(words.typeset(value)) if worse else value


def dotted(name: str) -> Markup:
    """The name of a layer, which may break at its dots, as markup."""
    return Markup(".<wbr>").join(escape(part) for part in name.split("."))


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


def fill_page(**variables: Any) -> str:
    """The page of these variables of `page.html.j2`. Text is escaped."""
    page = {
        "style": Markup(_FOLDER.joinpath("style.css").read_text(encoding="utf-8")),
        "outlines": OUTLINES,
        "tiles": [],
    }
    return words.printable(_template().render(**{**page, "notes": [], "footer": [], **variables}))


@cache
def _template() -> jinja2.Template:
    look: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, **look
    )
    environment.filters |= {"percent": words.percent, "typeset": words.typeset}
    environment.filters["is_chart"] = lambda cell: str(cell).startswith('<div class="row')
    return environment.get_template("page.html.j2")
