"""Reports in experiment trackers: MLflow's client writes to its store of files, and reads back what the report has."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.kit.made_results import HOSTILE, make_results, make_suite
from tests.kit.places import ROOT
from vlmcompress import cli
from vlmcompress.engines.vllm.serve import free_port
from vlmcompress.evaluation.report import files
from vlmcompress.utils.registry import TRACKERS


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Reports with and without speed, a verdict and a reducer; MLflow's store is `store` next to them."""
    values = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    values |= {"MLFLOW_TRACKING_URI": (tmp_path / "store").as_uri(), "MLFLOW_DISABLE_TELEMETRY": "true"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    suites = [make_suite(), make_suite(HOSTILE, "broken", visual_tokens=(8100, 4050), divergence=None)]
    results = {"a": make_results(suites=suites), "b": make_results("speed alone", gate=None, suites=[], samples=[])}
    for name, result in results.items():
        files.write_report(result, tmp_path / name)
    return [tmp_path / name for name in results]


def failed(capsys: pytest.CaptureFixture[str], *call: str) -> str:
    """The only line of a call that is refused."""
    assert cli.main(["report", *call]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_mlflow_has_what_the_report_has(reports: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for folder in reports for path in folder.iterdir()}
    assert cli.main(["report", *map(str, reports), "--to", "mlflow"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = (MlflowClient().get_run(line.split()[2].rstrip(",")) for line in lines)
    assert [run.info.status for run in (first, second)] == ["FINISHED"] * 2
    results = make_results()
    world, size = results.suites[0], results.candidate.weight_bytes
    metrics = first.data.metrics
    for key in ("baseline", "candidate", "difference", "low", "high"):
        assert metrics[f"suites/world/overall/{key}"] == getattr(world.overall, key)
    assert world.divergence is not None and metrics["suites/world/divergence/mean"] == world.divergence.mean
    other = "suites/" + "--svg--script-alert-1---script- - -rm- -quoted- - --"
    assert metrics[f"{other}/overall/difference"] == -17 / 400 and f"{other}/divergence/mean" not in metrics
    assert [metrics[f"{other}/visual_tokens/{side}"] for side in ("baseline", "candidate")] == [8100, 4050]
    assert metrics["weight_bytes/candidate"] == size and metrics["weight_bytes/baseline"] == 7_140_000
    assert results.bench is not None
    for name, ratio in results.bench.summary["serve"]["cold"].items():
        place = f"bench/summary/serve/cold/{name}"
        assert metrics[f"{place}/gain"] == ratio.gain and second.data.metrics[f"{place}/gain"] == ratio.gain
        assert (metrics[f"{place}/interval/low"], metrics[f"{place}/interval/high"]) == ratio.interval
    assert not [name for name in second.data.metrics if name.startswith("suites/")]
    parameters = first.data.params
    assert parameters["candidate/made/options/bits"] == "4" and parameters["candidate/scheme"] == "awq"
    assert parameters["candidate/engine/version"] == "0.32.0" and parameters["suites/world/samples"] == "900"
    assert parameters["candidate/made/versions/vlmcompress"] == "0.1.0" and parameters["bench/load"] == "closed:8"
    assert first.data.tags["verdict"] == "pass" and second.data.tags["verdict"] == ""
    assert "a loss of 1 point or more is ruled out" in first.data.tags["mlflow.note.content"].lower()
    for run, folder in zip((first, second), reports, strict=True):
        place = Path(run.info.artifact_uri.removeprefix("file://"), "report")
        assert {path.name: path.read_bytes() for path in place.iterdir()} == {
            path.name: content for path, content in before.items() if path.parent == folder
        }
    assert {path: path.read_bytes() for path in before} == before


def test_a_report_that_can_not_be_kept_leaves_no_run(
    reports: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its parameters and metrics are taken, its files are not: the experiment's place for them is below a file."""
    client, place = MlflowClient(), reports[0] / "report.md" / "below"
    experiment = client.create_experiment("full", artifact_location=place.as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "full")
    assert "mlflow did not take the report of demo-awq (" in failed(capsys, str(reports[0]), "--to", "mlflow")
    assert client.search_runs([experiment]) == []


def test_a_server_that_does_not_answer(
    reports: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, place = free_port(), reports[0].parent
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.chdir(place)
    line = failed(capsys, str(reports[0]), "--to", "mlflow")
    assert line.startswith("error: mlflow did not take the report of demo-awq (") and str(port) in line
    assert {path.name for path in place.iterdir()} == {"a", "b"}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_missing_client_is_named_with_its_extra(
    tracker: str, reports: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)  # as Python marks what can't be imported
    monkeypatch.chdir(reports[0].parent)
    line = failed(capsys, *map(str, reports), "--to", tracker)
    assert line == f"error: {tracker} is not installed; pip install '.[{tracker}]' in the checkout of vlmcompress"
    assert {path.name for path in Path().iterdir()} == {"a", "b"}
    assert tracker in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_wrong_calls(reports: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'mlflow'?" in failed(capsys, str(reports[0]), "--to", "mlfow")
    assert "leave out --to and --card" in failed(capsys, str(reports[0]), "--errors", "--to", "mlflow")
    assert "nowhere" in failed(capsys, str(reports[0]), "nowhere", "--to", "mlflow")
