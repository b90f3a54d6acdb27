"""The three report files: complete, well-formed, and free of anything from outside."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from tests.evaluation.conftest import make_results
from vlmcompress.errors import UserError
from vlmcompress.evaluation.accuracy import Results, differing
from vlmcompress.evaluation.html import _reach, thumbnail
from vlmcompress.evaluation.report import markdown, points, verdict, write_report

VOID = {"meta", "img", "br"}


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def png(size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def with_pictures(results: Results) -> Results:
    """Pictures for two lost samples and a gained one."""
    changed = differing(results.samples)
    return replace(results, pictures={s.id: [png((40, 30)), png((900, 600))] for s in (*changed[:2], changed[-1])})


def test_files(results: Results, tmp_path: Path) -> None:
    files = write_report(with_pictures(results), tmp_path / "a" / "report")
    assert sorted(file.name for file in files["json"].parent.iterdir()) == ["report.html", "report.md", "results.json"]
    found = json.loads(files["json"].read_text())
    assert found["schema"] == 1
    assert len(found["samples"]) == found["overall"]["n"] == 240
    assert set(found["families"]) == {"colour", "count", "reading <b>", "text"}
    assert found["overall"]["difference"] == results.overall.difference
    assert write_report(results, tmp_path / "a" / "report") == files  # again, over the old one


def test_page_is_well_formed_escaped_and_self_contained(results: Results, tmp_path: Path) -> None:
    text = write_report(with_pictures(results), tmp_path)["html"].read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert parser.seen.count("img") == 6 and parser.seen.count("svg") == 6  # axis, all, four families
    assert "script" not in parser.seen and "blue &lt;script&gt;" in text and "reading &lt;b&gt;" in text
    assert not re.search(r"(src|href)=\"(?!data:)|https?:|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_markdown(results: Results) -> None:
    text = markdown(results)
    assert text.startswith("# demo-awq against demo\n")
    assert "| **all** | 97.1% | 92.5% | -4.6 |" in text
    assert "9.0 MB before, 4.1 MB after (46%)" in text
    assert "Empty answers: 0 before, 2 after; cut off at 32 tokens: 1 before, 0 after" in text


@pytest.mark.parametrize(
    "loss, gain, says",
    [(0.08, 0.02, "less accurate"), (0.0, 0.09, "more accurate"), (0.01, 0.01, "No difference")],
)
def test_verdict(loss: float, gain: float, says: str) -> None:
    assert says in verdict(make_results(loss=loss, gain=gain).overall)


def test_example_order_puts_losses_first_and_alternates_families(results: Results) -> None:
    order = differing(results.samples)
    kinds = [0 if s.baseline_right else 1 for s in order]
    assert kinds == sorted(kinds) and len({s.family for s in order[:4]}) == 4


def test_points_have_no_negative_zero() -> None:
    assert [points(x) for x in (-0.013, 0.013, -0.0001, 0.0)] == ["-1.3", "+1.3", "0.0", "0.0"]


def test_axis_holds_all_intervals(results: Results) -> None:
    rows = [results.overall, *results.families.values()]
    assert max(abs(r.low) for r in rows) <= _reach(rows) <= 0.5
    assert _reach([replace(results.overall, low=-0.001, high=0.001)]) == 0.02


def test_large_pictures_shrink() -> None:
    assert thumbnail(png((20, 20))).startswith('<img class=small alt="" src="data:image/png')
    assert "data:image/jpeg" in thumbnail(png((900, 600)))


def test_unwritable_folder(results: Results, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't write the report"):
        write_report(results, tmp_path / "file")
