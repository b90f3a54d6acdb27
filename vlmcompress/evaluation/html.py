"""The report as one self-contained HTML page: inline style, inline SVG, images as data URIs; no script, no network."""

from __future__ import annotations

import base64
import io
import math
from html import escape
from pathlib import Path

from PIL import Image

from vlmcompress.evaluation.accuracy import Checkpoint, Results, Scored, differing
from vlmcompress.evaluation.paired import Paired

STYLE = Path(__file__).with_name("report.css")
THUMBNAIL = 360  # pixels


def page(results: Results, verdict: str, method: str) -> str:
    """The whole page.

    Args:
        verdict: the sentence at the top.
        method: the paragraph at the foot.
    """
    before, after = (escape(Path(side.path).name) for side in (results.baseline, results.candidate))
    parts = [
        f"<h1>{after} <span class=dim>against</span> {before}</h1>",
        f"<p class=verdict>{escape(verdict).replace(' -', ' &minus;').replace('(-', '(&minus;')}</p>",
        _cards(results),
        "<h2>Accuracy by family</h2>",
        _families(results),
        "<h2>Checkpoints</h2>",
        _checkpoints(results),
        _examples(results),
        f"<h2>Method</h2><p class=dim>{escape(method)}</p>",
        f"<p class=dim><small>{escape(results.created)} &middot; data {escape(Path(results.data['source']).name)} "
        f"{escape(results.data['sha256'][:12])} &middot; results.json has every answer</small></p>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{after} against {before}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>\n"
        "<body><main>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def tone(r: Paired) -> str:
    """CSS class: bad or good when the interval leaves zero on one side, else nothing."""
    return "bad" if r.high < 0 else "good" if r.low > 0 else ""


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def signed(fraction: float) -> str:
    """Points with a true minus sign."""
    text = f"{abs(100 * fraction):.1f}"
    return text if text == "0.0" else ("&minus;" if fraction < 0 else "+") + text


def _cards(results: Results) -> str:
    r, before, after = results.overall, results.baseline.weight_bytes, results.candidate.weight_bytes
    cards = [
        (percent(r.candidate_accuracy), f"accuracy, was {percent(r.baseline_accuracy)}", ""),
        (signed(r.difference), f"points, {r.level:.0%} interval {signed(r.low)} to {signed(r.high)}", tone(r)),
        (f"{after / 1e6:.1f} MB", f"weights, was {before / 1e6:.1f} MB ({after / max(before, 1):.0%})", ""),
        (percent(results.agreement), "same answer from both", ""),
    ]
    return (
        "<div class=cards>"
        + "".join(
            f'<div class="card"><b class="{kind}">{big}</b><small>{small}</small></div>' for big, small, kind in cards
        )
        + "</div>"
    )


def _families(results: Results) -> str:
    rows = [("all", results.overall), *results.families.items()]
    reach = _reach([r for _, r in rows])
    body = "".join(
        f'<tr class="{"all" if i == 0 else ""}"><td>{escape(name)}</td><td>{r.n}</td>'
        f"<td>{percent(r.baseline_accuracy)}</td><td>{percent(r.candidate_accuracy)}</td>"
        f'<td class="{tone(r)}">{signed(r.difference)}</td><td>{_interval(r, reach)}</td></tr>'
        for i, (name, r) in enumerate(rows)
    )
    return (
        '<div class="wide families"><table><thead><tr><th>family</th><th>n</th><th>baseline</th><th>candidate</th>'
        f"<th>points</th><th>{_axis(reach)}</th></tr></thead><tbody>{body}</tbody></table></div>"
    )


def _reach(rows: list[Paired]) -> float:
    """Half of the axis: the furthest limit, rounded up to a number that halves well, at least 2 points."""
    furthest = max([0.02, *(max(abs(r.low), abs(r.high)) for r in rows)])
    power = 10 ** math.floor(math.log10(furthest))
    return min(1.0, next(step * power for step in (1, 2, 3, 4, 6, 8, 10) if step * power >= furthest * (1 - 1e-9)))


def _x(value: float, reach: float) -> float:
    """Position on a 240 wide picture, with room for half a label at each end."""
    return round(120 + 108 * value / reach, 1)


def _axis(reach: float) -> str:
    ticks = {-reach: "", -reach / 2: " class=half", 0.0: "", reach / 2: " class=half", reach: ""}
    labels = "".join(
        f'<text x="{_x(v, reach)}" y="14"{kind}>{signed(v).removesuffix(".0")}</text>' for v, kind in ticks.items()
    )
    return f'<svg viewBox="0 0 240 20" role="img" aria-label="axis in points">{labels}</svg>'


def _interval(r: Paired, reach: float) -> str:
    grid = "".join(
        f'<line class="grid" x1="{_x(v, reach)}" x2="{_x(v, reach)}" y1="-4" y2="24"/>'
        for v in (-reach, -reach / 2, reach / 2, reach)
    )
    label = f"{signed(r.difference)}, interval {signed(r.low)} to {signed(r.high)}, p = {r.p:.3g}"
    return (
        f'<svg viewBox="0 0 240 20" role="img"><title>{label}</title>{grid}'
        f'<line class="zero" x1="{_x(0, reach)}" x2="{_x(0, reach)}" y1="-4" y2="24"/><g class="{tone(r)}">'
        f'<line class="range" x1="{_x(r.low, reach)}" x2="{_x(r.high, reach)}" y1="10" y2="10"/>'
        f'<circle cx="{_x(r.difference, reach)}" cy="10" r="4.5"/></g></svg>'
    )


def _checkpoints(results: Results) -> str:
    def cells(side: Checkpoint) -> list[str]:
        about = side.engine
        return [
            escape(Path(side.path).name),
            f"{side.weight_bytes / 1e6:.1f} MB",
            str(side.empty),
            str(side.cut_off),
            f"{side.seconds:.0f} s",
            escape(f"vLLM {about.get('version', '?')}, {about.get('device_name') or about.get('device', '?')}"),
        ]

    names = ["folder", "weights", "empty answers", f"cut off at {results.data.get('max_tokens', '?')} tokens"]
    names += ["time to answer", "engine"]
    rows = zip(names, cells(results.baseline), cells(results.candidate), strict=True)
    body = "".join(f"<tr><td>{name}</td><td>{before}</td><td>{after}</td></tr>" for name, before, after in rows)
    head = "<thead><tr><th></th><th>baseline</th><th>candidate</th></tr></thead>"
    return f"<div class=wide><table>{head}<tbody>{body}</tbody></table></div>"


def _examples(results: Results) -> str:
    changed = differing(results.samples)
    shown = [sample for sample in changed if sample.id in results.pictures]
    if not shown:
        return ""
    note = f"{len(changed)} of {len(results.samples)} questions; {len(shown)} shown, lost ones first."
    cards = "".join(_example(sample, results.pictures[sample.id]) for sample in shown)
    return f"<h2>Where the answers differ</h2><p class=dim>{note}</p><div class=examples>{cards}</div>"


def _example(sample: Scored, pictures: list[bytes]) -> str:
    images = "".join(thumbnail(picture) for picture in pictures)

    def said(label: str, text: str, right: bool) -> str:
        shown = escape(text[:200]) or "<i>nothing</i>"
        return f'<dt>{label}</dt><dd class="{"good" if right else "bad"}">{shown} {"&#10003;" if right else "&#10007;"}</dd>'

    return (
        f"<figure class=example><div class=images>{images}</div><div>{escape(sample.question[:400])}</div><dl>"
        f"<dt>expected</dt><dd>{escape(sample.expected)}</dd>"
        + said("baseline", sample.baseline, sample.baseline_right)
        + said("candidate", sample.candidate, sample.candidate_right)
        + f"</dl><figcaption><small>{escape(sample.family)} &middot; {escape(sample.id)}</small></figcaption></figure>"
    )


def thumbnail(png: bytes) -> str:
    """An `<img>`: small pictures as they are, pixels kept sharp; large ones shrunk to JPEG."""
    with Image.open(io.BytesIO(png)) as image:
        if max(image.size) <= THUMBNAIL:
            return f'<img class=small alt="" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        small = image.convert("RGB")
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=85)
        return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
