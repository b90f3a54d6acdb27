"""Weights & Biases: a run with parameters, metrics and the report as an artifact, on this machine unless `WANDB_MODE` says so.

A report has images and answers, which leave the machine with `WANDB_MODE=online` or `wandb sync`. `WANDB_PROJECT`,
`WANDB_DIR` and the client's other variables hold, too.
"""

from __future__ import annotations

import os

from vlmcompress.evaluation.trackers import TrackedReport


def log(report: TrackedReport) -> str:
    """Send a report; return its address, or the folder of an offline run."""
    mode = os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    place = None if mode == "offline" else str(report.folder.parent)  # for files that the server gets
    about = {"name": report.name, "notes": report.headline, "config": report.parameters}
    with wandb.init(dir=place, settings=wandb.Settings(silent=True, console="off"), **about) as run:
        run.log(report.metrics)
        run.summary["verdict"] = report.verdict
        artifact = wandb.Artifact("report", type="report")
        for file in sorted(report.folder.iterdir()):
            artifact.add_file(str(file))
        run.log_artifact(artifact)
        folder = run.settings.sync_dir
        return f"{folder}; wandb sync {folder} uploads it" if mode == "offline" else str(run.url)
