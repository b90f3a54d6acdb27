"""Many runs: what is put together, what is compared, and what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.made_results import comparison as compared
from tests.kit.made_results import make_bench, make_results, make_suite
from tests.kit.report_files import Balanced
from vlmcompress.cli import report as options
from vlmcompress.evaluation.report import comparison, files
from vlmcompress.evaluation.report.text import terminal
from vlmcompress.evaluation.results import Results, load_results
from vlmcompress.utils.errors import UserError


def written(folder: Path, **named: Results) -> list[Path]:
    for name, results in named.items():
        files.write_report(results, folder / name)
    return [folder / name for name in named]


def test_comparison_of_three(tmp_path: Path) -> None:
    runs: dict[str, Any] = {
        "a": make_results("awq"),
        "b": make_results("awq", suites=[make_suite(outcome="broken")], gate=None, bench=make_bench(1.9)),
        "c": make_results("../x y", bench=None, suites=[make_suite("other")]),
    }
    folders = [*written(tmp_path, **runs)[:2], tmp_path / "c" / "results.json"]
    files, on_terminal = comparison.write_comparison(folders, tmp_path / "out")
    data = json.loads(files["json"].read_text())
    assert [row["name"] for row in data["runs"]] == ["awq", "awq-2", "../x y"]
    assert [row["folder"] for row in data["runs"]] == ["awq", "awq-2", "-x-y"]
    assert [row["verdict"] for row in data["runs"]] == ["pass", "fail", "pass"]
    ratios = [runs[name].bench.summary["serve"]["cold"]["request_throughput"].gain for name in "ab"]
    assert [row["faster"] for row in data["runs"]] == [*ratios, None]
    assert data["runs"][1]["suites"]["world"]["difference"] == pytest.approx(-17 / 400)
    page = Balanced(files["html"].read_text())
    for link in (a for a in page.all("a") if not str(a["href"]).startswith("#")):
        assert (tmp_path / "out" / str(link["href"])).is_file()
    assert [a["class"] for a in page.all("div") if "plot" in str(a.get("class"))] == ["plots", "plot", "plot"]
    text = files["md"].read_text()
    assert text.startswith("# 3 candidates compared\n\n2 of 2 candidates pass gate default.") and "| 2 awq-2 |" in text
    for row in data["runs"]:
        for suite in row["suites"].values():
            share = f"{100 * suite['candidate'] / suite['baseline']:.1f}%"
            assert share in text and share in on_terminal


def test_headline_of_one_that_passes() -> None:
    rows = comparison.summarise(
        [make_results("good"), make_results("bad", gate=None, suites=[make_suite(outcome="broken")])]
    )
    passed, failed, smallest, fastest = comparison.headline(rows)
    assert (passed, failed) == ("1 of 1 candidate passes gate default.", "0 of 1 candidate passes a margin of 1 point.")
    assert smallest == "Smallest of those: good, 1.96x smaller." and fastest.startswith("Fastest of those: good, 1.")


def test_passes_of_several_margins_are_counted_apart() -> None:
    """30 points are no floor like 1 point; and a speed of one repeat makes nobody the fastest."""
    margins = {0.01: "broken", 0.02: "awq", 0.3: "awq"}
    suites = [[make_suite(overall=compared(outcome, margin=margin))] for margin, outcome in margins.items()]
    results = [
        make_results(f"m{i}", gate=None, suites=suite) for i, suite in enumerate([*suites, suites[0], suites[2]])
    ]
    bench = results[1].bench
    assert bench is not None
    ratio = bench.summary["serve"]["cold"]["request_throughput"].model_copy(update={"gain": 3.0, "interval": None})
    once = bench.model_copy(update={"summary": {"serve": {"cold": {"request_throughput": ratio}}}})
    rows = comparison.summarise([results[0], results[1].model_copy(update={"bench": once}), *results[2:]])
    assert comparison.headline(rows)[:3] == [
        "0 of 2 candidates pass a margin of 1 point.",
        "1 of 1 candidate passes a margin of 2 points.",
        "2 of 2 candidates pass a margin of 30 points.",
    ]
    assert "m1" not in comparison.headline(rows)[-1] and "3.00x, can't tell" in terminal(comparison.sections(rows))


def test_inputs_are_not_overwritten(tmp_path: Path) -> None:
    folders = written(tmp_path, demo=make_results("x"), other=make_results("demo"))
    with pytest.raises(UserError, match="holds one of the runs"):
        comparison.write_comparison(folders, folders[0])
    with pytest.raises(UserError, match="would be replaced"):
        comparison.write_comparison(folders, tmp_path)
    assert load_results(folders[0]).candidate.name == "x"
    comparison.write_comparison(folders[:1], folders[0])  # one run may be written again


def test_the_report_verb_merges_folders(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    options.options(parser)
    (folder,) = written(tmp_path, a=make_results())
    args = parser.parse_args([str(folder), "-o", str(tmp_path / "out")])
    code, data, text = options.run(args)
    assert code == 0 and data["files"]["html"] == str(tmp_path / "out" / "report.html") and "report.html" in text
    with pytest.raises(UserError, match="give a folder that vlmcompress eval or bench wrote"):
        options.run(parser.parse_args([str(tmp_path / "nowhere")]))
