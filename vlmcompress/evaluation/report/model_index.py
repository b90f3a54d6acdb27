"""Accuracy from reports in the metadata of a checkpoint's card, where the Hub shows it as evaluation results.

The format is the Hub's `model-index` (https://huggingface.co/docs/hub/model-cards#evaluation-results).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.evaluation import sides
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.words import printable
from vlmcompress.evaluation.results import Results, Side
from vlmcompress.export import card, manifest
from vlmcompress.utils import hub, json_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import save_files
from vlmcompress.utils.messages import foreign_errors

if TYPE_CHECKING:
    from huggingface_hub import EvalResult


def write_results(runs: Sequence[Results], out: Path) -> Path:
    """Write the accuracy of runs into the card of the checkpoint `out`, in place of what it has of the same suites.

    Returns:
        The card.

    Raises:
        UserError: `out` is not a checkpoint of ours, its card can't be read, or a run is not about it or has no accuracy.
    """
    from huggingface_hub import ModelCard

    manifest.read_manifest(out)
    checkpoint, file = sides.side(out, {}), out / card.CARD
    for run in runs:
        if _fingerprint(run.candidate) != _fingerprint(checkpoint):
            raise UserError(f"the report is of {run.candidate.name}, not of {out} as it is now; give a report of that")
        if not run.suites:
            raise UserError(f"the report of {run.candidate.name} has no accuracy; run vlmcompress eval --report")
    with foreign_errors(f"cannot read {file}", "; mend its metadata, or quantize again"):
        text = ModelCard(json_files.read_text(file))
        data: Any = text.data  # a `ModelCardData`
        before = data.eval_results or []
    new = {_place(record): record for run in runs for record in eval_results(run)}
    data.eval_results = [*(record for record in before if _place(record) not in new), *new.values()]
    data.model_name = data.model_name or out.resolve().name
    return save_files(out, {"card": (card.CARD, str(text))})["card"]


def eval_results(run: Results) -> list[EvalResult]:
    """The Hub's record of each suite: the candidate's score, under a name with the baseline's and the difference's interval."""
    from huggingface_hub import EvalResult

    records = []
    for suite in Findings(run).suites:
        c, about = suite.overall, suite.suite
        source = hub.parse_repository(about.source, "dataset")
        against = f"{printable(run.baseline.name)} has {c.baseline:.4f}"
        interval = f"{c.level:.0%} interval {c.low:+.4f} to {c.high:+.4f}"
        records.append(
            EvalResult(
                task_type="image-text-to-text",
                dataset_type=source.id if source else about.name,
                dataset_name=source.id if source else about.name,
                dataset_config=source.part if source else None,
                dataset_revision=source.revision if source else None,
                metric_type=about.metric,
                metric_config=about.name,
                metric_name=f"{about.metric} ({against}; difference {c.difference:+.4f}, {interval}; {c.n:,} samples)",
                metric_value=c.candidate,
            )
        )
    return records


def _place(record: EvalResult) -> tuple:
    """What two records of one suite share."""
    return record.unique_identifier, record.metric_config


def _fingerprint(side: Side) -> tuple:
    """What two checkpoints share only if their weights and visual tokens are the same, under any name."""
    return side.weight_bytes, side.scheme, side.reducer, side.layer_errors
