"""Many runs: what is put together, what is compared, and what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.made_results import comparison as compared
from tests.kit.made_results import make_bench, make_results, make_suite
from tests.kit.report_files import NAMES, Balanced
from vlmcompress.cli import report as options
from vlmcompress.evaluation.report import comparison, files
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.text import markdown
from vlmcompress.evaluation.results import Results, load_results
from vlmcompress.utils.errors import UserError

ONLY_ACCURACY: dict[str, Any] = {"bench": None, "gate": None}
ONLY_SPEED: dict[str, Any] = {"suites": [], "samples": [], "pictures": {}, "gate": None}


def written(folder: Path, **named: Results) -> list[Path]:
    for name, results in named.items():
        files.write_report(results, folder / name)
    return [folder / name for name in named]


def test_an_evaluation_and_a_benchmark_of_one_candidate_become_one() -> None:
    accuracy, speed = make_results(**ONLY_ACCURACY), make_results(**ONLY_SPEED)
    (merged,) = comparison.merge([accuracy, speed])
    assert merged.suites == accuracy.suites and merged.bench == speed.bench and merged.samples == accuracy.samples
    assert comparison.merge([speed, accuracy])[0].pictures == accuracy.pictures
    assert len(comparison.merge([accuracy, make_results(**{**ONLY_ACCURACY, "suites": [make_suite("other")]})])) == 1


@pytest.mark.parametrize("changes", [{"name": "other"}, {"bench": None, "gate": None}, ONLY_SPEED])
def test_differing_or_contradictory_reports_are_not_merged(changes: dict[str, Any]) -> None:
    assert len(comparison.merge([make_results(gate=None), make_results(**changes)])) == 2


def test_one_run_in_two_folders_gives_one_report(tmp_path: Path) -> None:
    folders = written(tmp_path, a=make_results(**ONLY_ACCURACY), b=make_results(**ONLY_SPEED))
    comparison.write_comparison(folders, tmp_path / "both")
    assert {path.name for path in (tmp_path / "both").iterdir()} == NAMES
    merged = load_results(tmp_path / "both")
    assert merged.bench and merged.suites


def test_comparison_of_three(tmp_path: Path) -> None:
    runs: dict[str, Any] = {
        "a": make_results("awq"),
        "b": make_results("awq", suites=[make_suite(outcome="broken")], gate=None, bench=make_bench(1.9)),
        "c": make_results("../x y", bench=None, suites=[make_suite("other")]),
    }
    files = comparison.write_comparison(
        [*written(tmp_path, **runs)[:2], tmp_path / "c" / "results.json"], tmp_path / "out"
    )
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
    assert text.startswith("# 3 candidates compared\n\n2 of 2 candidates pass gate default.") and "| awq-2 |" in text


def test_headline_of_one_that_passes() -> None:
    rows = comparison.summarise(
        [make_results("good"), make_results("bad", gate=None, suites=[make_suite(outcome="broken")])]
    )
    passed, failed, best = comparison.headline(rows)
    assert (passed, failed) == ("1 of 1 candidate passes gate default.", "0 of 1 candidate passes a margin of 1 point.")
    assert best.startswith("good: 1.96x smaller, 1.")


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
    assert "m1" not in comparison.headline(rows)[-1] and "3.00x, can't tell" in comparison.markdown(rows)


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


def test_recovery_of_several_precisions_in_a_table(tmp_path: Path) -> None:
    """Shares of the baseline's score, worked out here from the counts of right answers: in Markdown and on a terminal."""
    runs = {
        "awq": make_results("awq", gate=None),
        "lost": make_results("lost", gate=None, suites=[make_suite(outcome="broken")]),
    }
    folders = written(tmp_path, **runs)
    written_files = comparison.write_comparison(folders, tmp_path / "out")
    text = written_files["md"].read_text()
    output = comparison.comparison_tables(folders)
    line = next(
        line for line in text.split("## Recovery")[1].splitlines() if line.startswith(f"| {make_suite().name} |")
    )
    shares = []
    for results in runs.values():
        overall = results.suites[0].overall
        shares.append(100 * (overall.both + overall.candidate_only) / (overall.both + overall.baseline_only))
    assert [f"; {share:.1f}% (" in line for share in shares] == [True, True] and shares[1] < 96 < shares[0]
    assert all(f"{share:.1f}%" in output for share in shares)
    assert "| weights, times smaller |" in text and "| times faster |" in text


def test_recovery_in_a_report() -> None:
    results = make_results()
    overall = results.suites[0].overall
    section = markdown(Findings(results)).split("## Recovery")[1].split("##")[0]
    assert f"| {100 * overall.candidate / overall.baseline:.1f}% |" in section and " to " in section
    assert "| weights |" in section
