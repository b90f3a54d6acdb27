"""A report's accuracy in a checkpoint's card, as the Hub's own library reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard

from tests.kit import rtn
from tests.kit.made_results import make_results, make_suite
from tests.kit.tiny import build
from vlmcompress import cli
from vlmcompress.evaluation import sides
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.evaluation.report import files
from vlmcompress.evaluation.results import Results

HUB = "lmms-lab/DocVQA:DocVQA"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A W4A16 checkpoint."""
    folder = tmp_path_factory.mktemp("written")
    rtn.write(build("llava", folder / "source"), folder / "out", rtn.SCHEMES["w4-symmetric"])
    return folder / "out"


@pytest.fixture
def out(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "out"))


def report(out: Path, folder: Path, **changes: object) -> tuple[str, Results]:
    """A report of `out`, made up but for what it says of the checkpoint."""
    engine = {"name": "vllm", "version": "0.32.0"}
    results = make_results(**{"candidate": sides.side(out, engine)} | changes)
    files.write_report(results, folder)
    return str(folder), results


def records(out: Path) -> list[EvalResult]:
    return ModelCard.load(out / "README.md").data.eval_results or []


def test_the_hub_reads_the_figures_of_the_report(out: Path, tmp_path: Path) -> None:
    """Next to each is the baseline's. The rest of the card stays, a second report adds, and a newer one replaces."""
    card = ModelCard.load(out / "README.md")
    pages = make_suite("docvqa", "broken", source=HUB, metric="anls")
    first, results = report(out, tmp_path / "first", suites=[make_suite(), make_suite("chart", "fp8"), pages])
    assert cli.main(["report", first, "--card", str(out)]) == 0
    after = ModelCard.load(out / "README.md")
    assert after.text == card.text
    kept = {key: value for key, value in after.data.to_dict().items() if key != "model-index"}
    assert kept == card.data.to_dict() and after.data.model_name == "out"
    assert [(r.dataset_type, r.dataset_config, r.metric_type) for r in records(out)] == [
        ("world", None, "exact_match"),
        ("chart", None, "exact_match"),
        ("lmms-lab/DocVQA", "DocVQA", "anls"),
    ]
    for record, suite in zip(records(out), results.suites, strict=True):
        assert record.metric_value == suite.overall.candidate and record.metric_config == suite.name
        assert (
            f"demo has {suite.overall.baseline:.4f}; difference {suite.overall.difference:+.4f}" in record.metric_name
        )
    checks = {check.name: check for check in doctor.diagnose(out)}
    assert all(check.ok for check in checks.values()) and checks["files"].detail.endswith("README.md was edited")

    content = (out / "README.md").read_bytes()
    assert cli.main(["report", first, "--card", str(out)]) == 0 and (out / "README.md").read_bytes() == content
    hidden = EvalResult("image-text-to-text", "world", "mine", "exact_match", 0.5)
    after.data.eval_results = [*records(out), hidden]
    after.save(out / "README.md")
    newer, _ = report(out, tmp_path / "newer", suites=[make_suite(outcome="fp8")])
    other, _ = report(out, tmp_path / "other", suites=[make_suite("text", "small")])
    assert cli.main(["report", newer, other, "--card", str(out)]) == 0
    figures = {(r.metric_config, r.metric_value) for r in records(out)}
    assert figures == {
        ("chart", 871 / 900),
        ("docvqa", 368 / 400),
        (None, 0.5),
        ("world", 871 / 900),
        ("text", 384 / 400),
    }
    assert not (tmp_path / "report").exists() and not Path("report").exists()


def test_what_is_not_of_the_checkpoint_is_refused(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    side = sides.side(out, {})
    errors = {"layer": {"weight": 0.5}}
    cases = {
        "not of": {"candidate": side.model_copy(update={"weight_bytes": side.weight_bytes + 1})},
        "give a report of that": {"candidate": side.model_copy(update={"layer_errors": errors})},
        "as it is now": {"candidate": side.model_copy(update={"reducer": "divprune:0.5"})},
        "has no accuracy": {"suites": [], "samples": []},
    }
    content = (out / "README.md").read_bytes()
    for line, changes in cases.items():
        folder, _ = report(out, tmp_path / line.replace(" ", "-"), **changes)
        assert cli.main(["report", folder, "--card", str(out)]) == 2
        (message,) = capsys.readouterr().err.splitlines()
        assert line in message
    assert (out / "README.md").read_bytes() == content
    folder, _ = report(out, tmp_path / "right")
    damaged = {
        "README.md": lambda: (out / "README.md").unlink(),
        "model-index": lambda: (out / "README.md").write_text("---\nmodel-index: [{name: 3}]\n---\n"),
        "metadata": lambda: (out / "README.md").write_text("---\n[x\n---\n"),
        "vlmcompress.json": lambda: (out / "vlmcompress.json").unlink(),
    }
    for line, damage in damaged.items():
        damage()
        assert cli.main(["report", folder, "--card", str(out)]) == 2
        (message,) = capsys.readouterr().err.splitlines()
        assert line in message.replace("_", "-"), message


def test_the_same_checkpoint_under_another_name(out: Path, tmp_path: Path) -> None:
    folder, results = report(out, tmp_path / "report")
    renamed = out.rename(tmp_path / "renamed")
    assert cli.main(["report", folder, "--card", str(renamed), "-o", str(tmp_path / "page")]) == 0
    assert [record.metric_value for record in records(renamed)] == [results.suites[0].overall.candidate]
    assert json.loads((tmp_path / "page" / "results.json").read_text())["candidate"]["name"] == "out"
