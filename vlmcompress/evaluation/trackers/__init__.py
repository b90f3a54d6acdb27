"""Experiment trackers, which `report --to NAME` sends a report to.

Each file is one, named like its client's package and like the extra that installs that. It defines `log(report)`, which
imports the client, sends a `TrackedReport` where the client's own settings say, and returns a line on where it is. What it
raises is reported in a line; it leaves no half of a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlmcompress.evaluation.report import files, words
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.results import Results
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import temporary_folder
from vlmcompress.utils.messages import foreign_errors
from vlmcompress.utils.registry import TRACKERS

SIDES = ("baseline", "candidate")
_DATA = {"metric", "source", "sha256", "samples", "seed", "max_tokens"}
_LOAD = {"load", "requests", "out_tokens", "source", "sizes", "slo", "repeats", "tool"}


@dataclass(frozen=True)
class TrackedReport:
    """What trackers take of a report: the candidate's name, the verdict in a word (or ""), the summary, and its files.

    `parameters` say what was measured and how, `metrics` are the figures; see `parameters` and `metrics`.
    """

    name: str
    verdict: str
    headline: str
    parameters: dict[str, Any]
    metrics: dict[str, float]
    folder: Path


def send(results: Results, tracker: str) -> str:
    """Send a report to a tracker; return a line on where it is.

    Raises:
        UserError: there is no such tracker, its client is not installed, or it does not take the report.
    """
    log, findings, name = TRACKERS.get(tracker).log, Findings(results), words.printable(results.candidate.name)
    if find_spec(tracker.replace("-", "_")) is None:
        raise UserError(f"{tracker} is not installed; pip install '.[{tracker}]' in the checkout of vlmcompress")
    verdict, headline = findings.verdict, words.printable("\n".join(findings.headline))
    with temporary_folder("report") as folder:
        files.write_report(results, folder / "report")
        about = (name, words.VERDICTS[verdict] if verdict else "", headline)
        report = TrackedReport(*about, parameters(results), metrics(results), folder / "report")
        with foreign_errors(f"{tracker} did not take the report of {name}", "; see its address and settings"):
            return f"{tracker}: {log(report)}"


def parameters(results: Results) -> dict[str, Any]:
    """What was measured and how: recipe, engine and versions of both sides, data and load, named as in results.json."""
    about = results.model_dump(include={"version", "created", "machine"})
    sides = {side: getattr(results, side).model_dump(exclude={"layer_errors"}) for side in SIDES}
    suites = {suite.name: suite.model_dump(include=_DATA) for suite in results.suites}
    bench = results.bench.model_dump(include=_LOAD) if results.bench else {}
    return dict(_flat(about | sides | {"suites": suites, "bench": bench}))


def metrics(results: Results) -> dict[str, float]:
    """The figures, named as in results.json: `suites/world/overall/difference`, `bench/summary/serve/cold/ttft_p50_ms/gain`."""
    suites = {suite.name: suite.model_dump(exclude={"families", *_DATA}) for suite in results.suites}
    bench = results.bench.model_dump(include={"summary", "memory"}) if results.bench else {}
    weights = {side: getattr(results, side).weight_bytes for side in SIDES}
    values = _flat({"suites": suites, "bench": bench, "weight_bytes": weights})
    return {name: value for name, value in values if type(value) in (int, float)}


def _flat(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """What nested mappings and pairs hold, by names joined with slashes, in characters that every tracker takes."""
    for key, value in values.items():
        name = place + (re.sub(r"[^\w.\- ]", "-", key).strip(". ") or "-")
        if isinstance(value, tuple):
            value = dict(zip(("low", "high") if key == "interval" else SIDES, value, strict=True))
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
        elif value not in ("", None, [], math.inf):
            yield name, value
