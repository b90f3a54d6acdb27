"""A `results.json` that cannot be what a run found is refused in one line."""

from __future__ import annotations

import json

import pytest

from tests.kit.made_results import make_results
from vlmcompress.evaluation.report import files
from vlmcompress.evaluation.results import load_results
from vlmcompress.utils.errors import UserError


@pytest.mark.parametrize(
    "where, value, message",
    [
        (("suites", 0, "samples"), -1, "suites.0.samples"),
        (("suites", 0, "overall", "n"), -5, "suites.0.overall.n"),
        (("suites", 0, "overall", "difference"), float("nan"), "NaN, which is not a number"),
        (("suites", 0, "agreement"), 7, "suites.0.agreement"),
        (("candidate", "weight_bytes"), -1, "candidate.weight_bytes"),
        (("candidate", "weight_bytes"), 10**400, "candidate.weight_bytes"),
    ],
)
def test_impossible_results_are_refused(where, value, message, tmp_path):
    """Counts below zero, shares above one and NaN are refused in one line."""
    data = make_results().to_dict()
    inner = data
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    (tmp_path / "results.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=message):
        load_results(tmp_path)


@pytest.mark.parametrize("picture", ["AAAA", "!!", ""])
def test_files_that_are_no_pictures(picture, tmp_path):
    results = make_results()
    results = results.model_copy(update={"pictures": {sample.id: [picture] for sample in results.samples}})
    with pytest.raises(UserError, match="a picture that is not a PNG"):
        files.write_report(results, tmp_path / "report")
