"""vLLM in containers: Docker Compose and Kubernetes.

Compose asks for GPUs by `deploy.resources.reservations.devices`. On Kubernetes a Deployment has GPU limits and a probe on
`/health`, and the checkpoint comes from a PersistentVolumeClaim.
"""

from __future__ import annotations

from typing import Any

import yaml

from vlmcompress.export.launch import vllm
from vlmcompress.export.readers import LoadFacts

IMAGE = "vllm/vllm-openai:v0.32.0"
NOWHERE = "none.invalid"  # a host that can't exist (RFC 2606): vLLM fetches any address without a list of allowed hosts
_DOCKERFILE = f"""# vLLM with vlmcompress's plugin, which the checkpoint's reducer needs.
FROM {IMAGE}
# A name in your index, the address of a wheel, or git+https://...
ARG VLMCOMPRESS=vlmcompress
RUN pip install --no-cache-dir "$VLMCOMPRESS"
"""
_COMPOSE = """# {name} in vLLM, for `docker compose -f serve/compose.yaml up`. Written by vlmcompress.
# Reachable from this machine only: change 127.0.0.1 to publish it, and set --api-key then. Images come within requests;
# to have them fetched from addresses, put the allowed hosts in the place of {nowhere}.
"""
_KUBERNETES = """# {name} in vLLM on Kubernetes, for `kubectl apply -f serve/kubernetes.yaml`. Written by vlmcompress.
# The claim {resource}-files is expected to hold the checkpoint's files. Images come within requests; to have them fetched from
# addresses, put the allowed hosts in the place of {nowhere}.{image}
"""
_BUILD = "\n# Build serve/Dockerfile, push it to where the cluster pulls from, and name it below."


def image(facts: LoadFacts) -> str:
    """The container's image: vLLM's own, or the one that `Dockerfile` builds."""
    return f"{facts.resource}-vllm:0.32" if facts.reducer else IMAGE


def arguments(facts: LoadFacts) -> list[str]:
    """The whole command in a container that has the checkpoint at `/model`."""
    address = ["--host", "0.0.0.0", "--port", "8000", "--allowed-media-domains", NOWHERE]
    return ["vllm", "serve", "/model", *vllm.flags(facts), *address]


def compose(facts: LoadFacts) -> dict[str, str]:
    """`compose.yaml`, and `Dockerfile` where the checkpoint carries a reducer."""
    program, *flags = arguments(facts)
    gpus = {"driver": "nvidia", "count": facts.gpus, "capabilities": ["gpu"]}
    service: dict[str, Any] = {
        "image": image(facts),
        **({"build": {"context": ".", "dockerfile": "Dockerfile"}} if facts.reducer else {}),
        "entrypoint": [program],
        "command": flags,
        "environment": vllm.environment(facts),
        "volumes": ["..:/model:ro"],
        "ports": ["127.0.0.1:8000:8000"],
        "shm_size": "8gb",  # processes of tensor parallelism and of the image processor share memory
        "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
        "restart": "unless-stopped",
    }
    content = yaml.safe_dump({"services": {facts.resource: service}}, sort_keys=False)
    text = _COMPOSE.format(name=facts.name, nowhere=NOWHERE) + content
    return {"compose.yaml": text} | ({"Dockerfile": _DOCKERFILE} if facts.reducer else {})


def kubernetes(facts: LoadFacts) -> dict[str, str]:
    """`kubernetes.yaml`: a Deployment and a Service."""
    head = _KUBERNETES.format(
        name=facts.name, resource=facts.resource, nowhere=NOWHERE, image=_BUILD if facts.reducer else ""
    )
    name, label = {"name": facts.resource}, {"app": facts.resource}
    container: dict[str, Any] = {
        "name": "vllm",
        "image": image(facts),
        "command": arguments(facts),
        "env": [{"name": key, "value": value} for key, value in vllm.environment(facts).items()],
        "ports": [{"containerPort": 8000}],
        "resources": {"limits": {"nvidia.com/gpu": facts.gpus}},
        # Loading takes minutes: no request is sent before /health answers.
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 10, "timeoutSeconds": 5},
        "volumeMounts": [
            {"name": "model", "mountPath": "/model", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    volumes = [
        {"name": "model", "persistentVolumeClaim": {"claimName": f"{facts.resource}-files", "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
    ]
    pod = {"metadata": {"labels": dict(label)}, "spec": {"containers": [container], "volumes": volumes}}
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": dict(label)},
        "strategy": {"type": "Recreate"},  # a second replica would wait for a GPU that the first one holds
        "template": pod,
    }
    service = {"selector": dict(label), "ports": [{"port": 8000}]}
    documents = (
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": name, "spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": dict(name), "spec": service},
    )
    return {"kubernetes.yaml": head + yaml.safe_dump_all(documents, sort_keys=False)}
