"""Stored figures, counted anew from the questions and texts that they were computed from."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.kit.places import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
import recount


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the script on a table; return its exit code and the counts of its last line."""

    def run(table: str) -> tuple[int, dict[str, int]]:
        monkeypatch.setattr(sys, "argv", ["recount.py", table])
        with pytest.raises(SystemExit) as ended:
            recount.main()
        return int(ended.value.code or 0), json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.parametrize("table", ["accuracy", "boxes", "pages", "clips", "photo", "mixed", "weights"])
def test_stored_figures_are_those_of_their_questions(table, printed) -> None:
    code, counts = printed(table)
    assert (code, counts["differ"]) == (0, 0) and counts["rows"] > 2


def test_a_figure_that_its_questions_do_not_give_is_named(printed, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    shutil.copy(recount.EVAL / "rows" / "accuracy.npz", tmp_path / "rows")
    rows = json.loads((recount.EVAL / "accuracy.json").read_text())
    rows[0]["overall"]["difference"] += 0.001
    rows[1]["overall"] |= {"low": rows[1]["overall"]["difference"], "high": rows[1]["overall"]["difference"]}
    (tmp_path / "accuracy.json").write_text(json.dumps(rows))
    monkeypatch.setattr(recount, "EVAL", tmp_path)
    assert printed("accuracy") == (1, {"rows": len(rows), "differ": 2})
