"""MLflow: a run with parameters, metrics and the report's files, where `MLFLOW_TRACKING_URI` says.

By default that is a database in the current folder. `MLFLOW_EXPERIMENT_NAME` names the experiment.
"""

from __future__ import annotations

import contextlib
import os

from vlmcompress.evaluation.trackers import TrackedReport


def log(report: TrackedReport) -> str:
    """Send a report; return the run's id and where its files are. A run that fails is deleted."""
    # The client's own seven repetitions take over four minutes where no server is.
    for name, value in {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
        os.environ.setdefault(name, value)
    import mlflow

    run = mlflow.start_run(run_name=report.name, description=report.headline, tags={"verdict": report.verdict}).info
    try:
        mlflow.log_params(report.parameters)
        mlflow.log_metrics(report.metrics)
        mlflow.log_artifacts(str(report.folder), "report")
        mlflow.end_run()
    except BaseException:
        with contextlib.suppress(Exception):  # a server that has gone can't be asked for it
            mlflow.end_run("FAILED")
            mlflow.delete_run(run.run_id)
        raise
    return f"run {run.run_id}, with the report in {run.artifact_uri}"
