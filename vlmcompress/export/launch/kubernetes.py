"""vLLM on Kubernetes: a Deployment with GPU limits and probes on `/health`, and a Service.

The checkpoint comes from a PersistentVolumeClaim. Loading takes minutes, so a startup probe waits for it and the liveness probe
begins afterwards. Annotations ask Prometheus to read `/metrics`, which `grafana.json` shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmcompress.export.launch import compose, vllm
from vlmcompress.export.launch._template import documents
from vlmcompress.export.readers import LoadFacts

TITLE = "Kubernetes"
CHECKED = "structure and vLLM's flags checked in our tests, not run"

ENGINE, GPUS = "vllm", True
_HEAD = """# {name} in vLLM on Kubernetes, for `kubectl apply -f serve/kubernetes.yaml`. Written by vlmcompress.
# The claim {claim} is expected to hold the checkpoint's files. Images come within requests; to have them fetched from
# addresses, put the allowed hosts in the place of {nowhere}.{image}
"""
_IMAGE = "\n# Build serve/Dockerfile, push it to where the cluster pulls from, and name it below."


def files(facts: LoadFacts) -> Mapping[str, str]:
    """`kubernetes.yaml`."""
    head = _HEAD.format(
        name=facts.name, claim=_claim(facts), nowhere=compose.NOWHERE, image=_IMAGE if facts.reducer else ""
    )
    label = {"app.kubernetes.io/name": facts.resource}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": facts.resource, "labels": label},
        "spec": {"selector": label, "ports": [{"name": "http", "port": 8000, "targetPort": "http"}]},
    }
    return {"kubernetes.yaml": head + documents(_deployment(facts), service)}


def command(facts: LoadFacts) -> str:
    """The line that applies it, from the checkpoint's folder."""
    return "kubectl apply -f serve/kubernetes.yaml"


def _claim(facts: LoadFacts) -> str:
    return f"{facts.resource}-files"


def _deployment(facts: LoadFacts) -> dict[str, Any]:
    label = {"app.kubernetes.io/name": facts.resource}
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": "8000", "prometheus.io/path": "/metrics"}
    volumes = [
        {"name": "model", "persistentVolumeClaim": {"claimName": _claim(facts), "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
    ]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": facts.resource, "labels": label},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": label},
            "strategy": {"type": "Recreate"},  # a second replica would wait for a GPU that the first one holds
            "template": {
                "metadata": {"labels": label, "annotations": scraped},
                "spec": {"containers": [_container(facts)], "volumes": volumes},
            },
        },
    }


def _container(facts: LoadFacts) -> dict[str, Any]:
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5}
    gpus = {"nvidia.com/gpu": facts.gpus}
    variables = [{"name": key, "value": value} for key, value in vllm.environment(facts).items()]
    return {
        "name": "vllm",
        "image": compose.image(facts),
        "command": compose.arguments(facts),
        **({"env": variables} if variables else {}),
        "ports": [{"name": "http", "containerPort": 8000}],
        "resources": {"limits": gpus, "requests": gpus},
        "startupProbe": {**health, "failureThreshold": 180},  # half an hour
        "readinessProbe": {**health, "failureThreshold": 1},
        "livenessProbe": {**health, "failureThreshold": 6},
        "volumeMounts": [
            {"name": "model", "mountPath": "/model", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
