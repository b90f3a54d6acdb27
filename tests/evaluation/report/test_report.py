"""The files of a report: complete, well-formed, readable, safe whatever a model answers, free of anything from outside."""

from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageColor

from tests.kit.made_results import HOSTILE, comparison, make_results, make_samples, make_suite
from tests.kit.report_files import NAMES, Balanced
from vlmcompress.evaluation.accuracy.compare import changed_answers
from vlmcompress.evaluation.report import files, html, words
from vlmcompress.evaluation.report.document import Table
from vlmcompress.evaluation.report.files import junit
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.html import report_page
from vlmcompress.evaluation.report.sections import measured
from vlmcompress.evaluation.report.text import markdown, tables
from vlmcompress.evaluation.results import SCHEMA, Gate, GateRule, Results, load_results
from vlmcompress.utils.errors import UserError

VARIANTS: dict[str, dict[str, Any]] = {
    "everything": {},
    "accuracy alone": {"bench": None, "gate": None},
    "bench alone": {"suites": [], "samples": [], "gate": None, "pictures": {}},
    "three suites": {"gate": None, "suites": [make_suite("a"), make_suite("b", "small"), make_suite("c", "broken")]},
    "graded scores": {
        "suites": [
            make_suite(
                overall=comparison("awq", both=None, baseline_only=None, candidate_only=None, neither=None),
                divergence=None,
                families={},
            )
        ]
    },
    "nothing": {"suites": [], "samples": [], "gate": None, "pictures": {}, "bench": None},
}


def test_writes_what_load_reads(results: Results, tmp_path: Path) -> None:
    written = files.write_report(results, tmp_path / "a" / "report")
    assert {path.name for path in (tmp_path / "a" / "report").iterdir()} == NAMES
    assert load_results(written["json"].parent) == results
    assert files.write_report(results, tmp_path / "a" / "report") == written  # over the old one


@pytest.mark.parametrize("name", VARIANTS)
def test_page_is_well_formed_and_self_contained(name: str) -> None:
    text = report_page(Findings(make_results(**VARIANTS[name])))
    parsed = Balanced(text)
    assert not parsed.all("script") and not parsed.all("link") and "\x00" not in text
    assert not re.search(r"(src|href)=\"(?!data:|#)|https?:|@import|url\(", text)
    ids = Counter(a["id"] for _, a in parsed.reduced_units if "id" in a)
    assert all(count == 1 for count in ids.values())
    assert {a["href"] for a in parsed.all("a")} <= {f"#{name}" for name in ids}
    charts = [a for a in parsed.all("div") if a.get("role") == "img"]
    assert all(a.get("aria-label") for a in charts) and all(a.get("alt") for a in parsed.all("img"))
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_page_shows_everything(results: Results) -> None:
    text = report_page(Findings(results))
    parsed = Balanced(text)
    assert [a["id"] for a in parsed.all("section")] == [
        *("gate", "accuracy", "speed", "memory", "layers", "examples", "made", "method")
    ]
    rows = [str(a["class"]).split() for a in parsed.all("div") if str(a.get("class")).startswith("row ")]
    assert sum("ruler" in row for row in rows) == 1 and len(rows) == 1 + 4
    assert len(parsed.all("img")) == 4 and text.count('<figure class="example card">') == 17
    assert "17 of 60 samples, 10 of them lost" in " ".join(text.split())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scheme: str) -> None:
    """WCAG 2.2, success criterion 1.4.3: at least 4.5 to 1 for text, with its formula of relative luminance."""
    style = Path(files.__file__).with_name("style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    colours = dict(re.findall(r"--([\w-]+): (#\w+);", blocks[0]))
    if scheme == "dark":
        colours |= dict(re.findall(r"--([\w-]+): (#\w+);", blocks[1]))

    def rgb(name: str) -> list[int]:
        digits = colours[name][1:]
        digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
        return [int(digits[i : i + 2], 16) for i in (0, 2, 4)]

    def luminance(name: str) -> float:
        parts = [part / 255 for part in rgb(name)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = [(text, ground) for text in ("fg", "dim", "mark", "good", "bad") for ground in ("bg", "card")]
    pairs += [(tone, f"{tone}-bg") for tone in ("good", "bad", "unsure", "mark")] + [
        ("fg", "bad-bg"),
        ("fg", "good-bg"),
    ]
    for text, ground in pairs:
        light, dark = sorted((luminance(text), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text} on {ground}"


@pytest.mark.parametrize("name", VARIANTS)
def test_one_table_in_three_renderings(name: str) -> None:
    """Every text of every table of what was measured is on the terminal, in Markdown and on the page."""
    findings = Findings(make_results(**VARIANTS[name]))
    terminal, text, page = tables(findings), markdown(findings), unescape(report_page(findings))
    for part in (part for section in measured(findings) for part in section.parts if isinstance(part, Table)):
        for cell in (cell for row in part.rows for cell in row):
            printed = words.printable(cell)
            assert printed in terminal and printed in re.sub(r"\\(.)", r"\1", text)
            assert words.typeset(printed) in page
    assert "<script" not in text.replace("\\<", "") and "\x1b" not in text + terminal
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


def test_junit_of_a_gate() -> None:
    rules = [
        GateRule(name="size", verdict="pass", value="0.5x", limit="0.6x"),
        GateRule(name="speed", verdict="inconclusive", value="none", limit="1.1x", reason="not measured"),
        GateRule(name=f"accuracy {HOSTILE}", verdict="fail", value="-4.2", limit="-1.0", reason="lost"),
    ]
    results = make_results(gate=Gate(name="g", verdict="fail", rules=rules))
    root = ElementTree.fromstring(junit(Findings(results)).encode())
    assert {k: root.get(k) for k in ("tests", "failures", "skipped", "errors")} == {
        "tests": "3",
        "failures": "1",
        "skipped": "1",
        "errors": "0",
    }
    cases = root.findall("testsuite[@name='gate g']/testcase")
    assert [case[0].tag for case in cases] == ["system-out", "skipped", "failure"]
    assert cases[1][0].get("message") == "none, limit 1.1x: not measured"


def test_junit_without_a_gate_has_the_suites() -> None:
    """Families are not judged unless a gate asks for it."""
    results = make_results(gate=None, suites=[make_suite("s", "broken")])
    root = ElementTree.fromstring(junit(Findings(results)).encode())
    assert [case.get("name") for case in root.iter("testcase")] == ["all"]
    assert (root.get("failures"), root.get("skipped")) == ("1", "0")


def test_one_verdict_a_row() -> None:
    """The page's table of accuracy judges a family by the gate's rule on it, and no other."""
    limit = {"limit": "-30.0 points", "suite": "world", "margin": 0.3}
    rules = [GateRule(name="world: chart", verdict="pass", value="", family="chart", **limit)]
    text = report_page(Findings(make_results(gate=Gate(name="g", verdict="pass", rules=rules))))
    table = text[text.index('<section id="accuracy">') :].partition("</table>")[0]
    marks = [re.findall(r'class="pill (\w+)"', row) for row in re.split(r'<tr(?: class="all")?><th', table)[2:]]
    assert marks == [["pass"], ["pass"], [], []]
    assert "world: chart" in text and '<td data-head="margin">30</td>' in table


def test_old_results_load(results: Results, tmp_path: Path) -> None:
    """Those from before rules had a family and sides had their recipe."""
    data = results.to_dict()
    for rule in data["gate"]["rules"]:
        del rule["suite"], rule["family"], rule["margin"]
    for side in ("baseline", "candidate"):
        del data[side]["made"]
    (tmp_path / "results.json").write_text(json.dumps(data))
    old = load_results(tmp_path)
    assert old.candidate.made is None and old.suites == results.suites
    findings = Findings(old)
    assert 'id="made"' not in report_page(findings) and "How demo" not in markdown(findings)


def test_examples_show_losses_first_and_families_in_turn() -> None:
    output = changed_answers(make_samples())
    assert [sample.change for sample in output] == [0] * 10 + [1] + [2] * 6
    assert all(sample.baseline != sample.candidate for sample in output)
    lost = [s.model_copy(update={"family": "ab"[s.id in ("q0", "q6")]}) for s in make_samples()]
    assert [sample.family for sample in changed_answers(lost)[:4]] == ["a", "b", "a", "b"]


def test_large_pictures_shrink() -> None:
    def png(size: tuple[int, int]) -> str:
        buffer = io.BytesIO()
        Image.effect_noise(size, 60).convert("RGBA").save(buffer, "PNG")
        return base64.b64encode(buffer.getvalue()).decode()

    assert html.thumbnail(png((20, 20)))[0].startswith("data:image/png")
    source, small = html.thumbnail(png((1200, 800)))
    with Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) as image:
        assert image.size == (360, 240) and not small
    regions = {"expected": "[500, 0, 1000, 500]", "baseline": "(0.25, 0.75)", "candidate": "none"}
    source, _ = html.thumbnail(png((180, 120)), regions)
    with Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) as image:
        assert image.size == (360, 240) and image.getpixel((180, 60)) == ImageColor.getrgb(html.OUTLINES["expected"])
        assert image.getpixel((90, 180)) == ImageColor.getrgb(html.OUTLINES["baseline"])


def test_samples_about_boxes_have_them_in_the_color_of_their_side() -> None:
    results = make_results()
    suite = results.suites[0]
    boxes = suite.model_copy(update={"metric": "box_match"})
    color = f'<dt style="color: {html.OUTLINES["candidate"]}">candidate'
    for changed, colored in (
        (boxes, True),
        (boxes.model_copy(update={"name": "refcoco_pixels"}), False),
        (suite, False),
    ):
        samples = [sample.model_copy(update={"suite": changed.name}) for sample in results.samples]
        update = {"suites": [changed], "samples": samples, "gate": None}
        assert (color in html.report_page(Findings(results.model_copy(update=update)))) == colored


def test_unwritable_folder(results: Results, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        files.write_report(results, tmp_path / "file")


def test_a_report_that_can_not_be_completed_leaves_no_parts(results: Results, tmp_path: Path) -> None:
    (tmp_path / "junit.xml").mkdir()
    with pytest.raises(UserError, match="junit.xml"):
        files.write_report(results, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_json_is_plain(results: Results, tmp_path: Path) -> None:
    content = json.loads(files.write_report(results, tmp_path)["json"].read_text())
    assert content["schema"] == SCHEMA and len(content["samples"]) == 60
