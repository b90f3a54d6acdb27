"""`--report R`: a report of other checkpoints and foreign files are refused before any work, the same two go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.echo import Echo, checkpoint, picture, question, write_rows
from tests.kit.made_results import make_bench, make_results
from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli
from vlmcompress.cli._conclude import conclude, require_report_folder
from vlmcompress.cli._outcome import OK, UNDECIDED
from vlmcompress.evaluation.accuracy import accuracy
from vlmcompress.evaluation.accuracy import gate as gates
from vlmcompress.evaluation.report import files
from vlmcompress.evaluation.results import Side, load_results
from vlmcompress.utils.errors import UserError


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_bad_report_folders_are_refused(tmp_path, capsys):
    """By every verb that writes a report, with nothing changed; before a wrong path of a checkpoint is reported."""
    report, foreign, other = tmp_path / "report", tmp_path / "foreign", tmp_path / "other"
    files.write_report(make_results(), report)
    files.write_report(make_results("something else"), other)
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    demo = str(DEMO_LLAVA)
    output = f"{report} has the report of demo-awq against demo; choose another folder or pass --overwrite"
    calls = {
        ("eval", demo, "--baseline", demo, "--report", str(report)): output,
        ("eval", demo, "--engine", "hf", "--reduce", "dart:0.5", "--report", str(report)): output,
        ("eval", "a", "--baseline", "b", "--engine", "openai:http://127.0.0.1:1/v1", "--report", str(report)): output,
        ("bench", demo, "--baseline", demo, "--report", str(report)): output,
        ("report", str(other), "-o", str(report)): output,
        (
            "eval",
            demo,
            "--baseline",
            demo,
            "--report",
            str(foreign),
            "--overwrite",
        ): "has no results.json, so it is not",
        ("bench", demo, "--baseline", demo, "--report", str(foreign)): "has no results.json, so it is not ours",
        ("report", str(other), "-o", str(foreign)): "has no results.json, so it is not ours to overwrite",
        ("report", str(other), str(report), "-o", str(foreign)): "has no comparison.json, so it is not ours",
    }
    before = content(report), content(foreign)
    for call, line in calls.items():
        code, err = cli.main(list(call)), capsys.readouterr().err
        assert code == 2 and line in err and len(err.splitlines()) == 1, (call, err)
    assert (content(report), content(foreign)) == before
    assert cli.main(["report", str(other), "-o", str(report), "--overwrite"]) == 0
    assert load_results(report).candidate.name == "something else"


def test_runs_of_the_same_two_models_fill_one_report(tmp_path):
    """What is expected of a candidate before it runs is what its results have afterwards; a killed run continues. The gate
    that the accuracy was judged by stays, and judges the speed when it comes; only the call that named it ends by it."""
    row = {"id": "0", "question": "0?", "answer": "0?", "image": picture(tmp_path, "0.png")}
    data = write_rows(tmp_path / "data.jsonl", row)
    before, after = checkpoint(tmp_path / "before"), checkpoint(tmp_path / "after")
    engine, report = Echo(question), tmp_path / "report"

    def sides() -> tuple[Side, Side]:
        return accuracy.described(before, engine), accuracy.described(after, engine)

    report.mkdir()
    for name in (files.JOURNAL, f".{files.JOURNAL}.lock", ".results.json.part"):  # as a run leaves them that is killed
        (report / name).write_text("")
    require_report_folder(report, sides, overwrite=False)
    options = accuracy.EvalOptions(engine, engine, journal=report / files.JOURNAL)
    (results,) = accuracy.evaluate_all([after], before, [None], data, options)
    speed_rule = gates.SpeedRule(metric="request_throughput", at_least=0.01)
    gate = gates.GateFile(name="both", suites={"*": gates.SuiteRules(margin=0.5)}, speed=[speed_rule])
    assert conclude(results, gate, report, overwrite=False)[0] == UNDECIDED
    assert [rule.value for rule in load_results(report).gate.rules][1] == "not measured"
    require_report_folder(report, sides, overwrite=False)
    speed = results.model_copy(update={"suites": [], "samples": [], "bench": make_bench()})
    assert conclude(speed, None, report, overwrite=False)[0] == OK
    assert load_results(report).suites == results.suites and load_results(report).bench == speed.bench
    assert (
        load_results(report).gate == gates.judge(load_results(report), gate)
        and load_results(report).gate.rules[1].verdict == "pass"
    )
    damaged = load_results(report).gate.model_copy(update={"file": {"suites": 3}})
    with pytest.raises(UserError, match="gate both is damaged: suites is 3"):
        gates.recorded(damaged)
    assert accuracy.described(report, engine) == results.baseline, "a baseline may be an earlier report"


def test_a_report_that_cannot_be_read(tmp_path):
    """It is refused before hours of work, and replaced with `--overwrite`."""
    (tmp_path / "results.json").write_text('{"schema": 1}')
    results = make_results()
    call = cli.parse(["eval", "x", "--baseline", "y", "--report", str(tmp_path), "--overwrite"])

    def sides() -> tuple[Side, Side]:
        return results.baseline, results.candidate

    with pytest.raises(UserError, match="schema 1"):
        require_report_folder(call.report, sides, overwrite=False)
    require_report_folder(call.report, sides, overwrite=call.overwrite)
    conclude(results, None, call.report, overwrite=call.overwrite)
    assert load_results(tmp_path) == results
