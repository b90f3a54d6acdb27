"""vLLM in containers: Docker Compose, Kubernetes, and Triton Inference Server with its vLLM backend.

Compose asks for GPUs by `deploy.resources.reservations.devices`, and vLLM's `/health` with the Python that the image has. On
Kubernetes a Deployment has GPU limits and probes on `/health`, the checkpoint comes from a PersistentVolumeClaim, and
annotations ask Prometheus to read `/metrics`, which `grafana.json` shows; loading takes minutes, so a startup probe waits for
it. Triton's files are those of the backend's sample (triton-inference-server/vllm_backend at 8de0c14,
`samples/model_repository`, `src/model.py`): inputs, outputs and the decoupled policy are filled in by the backend, and
`model.json` holds arguments of vLLM's `AsyncEngineArgs`; a vLLM older than 0.32 may not know one.
"""

from __future__ import annotations

import json
from typing import Any

from vlmcompress.export.launch import vllm
from vlmcompress.export.launch._shell import documents
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
_HEALTH = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"
_PBTXT = """# {name} in Triton Inference Server, backend vLLM. Written by vlmcompress.
# Inputs and outputs are the backend's own. To see vLLM's metrics at Triton's /metrics, which costs some speed, add
#   parameters: {{ key: "REPORT_CUSTOM_METRICS" value: {{ string_value: "true" }} }}
name: "{name}"
backend: "vllm"
instance_group [
  {{
    count: 1
    kind: KIND_MODEL
  }}
]
"""


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
    environment = vllm.environment(facts)
    service: dict[str, Any] = {
        "image": image(facts),
        **({"build": {"context": ".", "dockerfile": "Dockerfile"}} if facts.reducer else {}),
        "entrypoint": [program],
        "command": flags,
        **({"environment": environment} if environment else {}),
        "volumes": ["..:/model:ro"],
        "ports": ["127.0.0.1:8000:8000"],
        "shm_size": "8gb",  # processes of tensor parallelism and of the image processor share memory
        "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _HEALTH],
            "interval": "10s",
            "timeout": "6s",
            "retries": 3,
            "start_period": "20m",
        },
        "restart": "unless-stopped",
    }
    text = _COMPOSE.format(name=facts.name, nowhere=NOWHERE) + documents({"services": {facts.resource: service}})
    return {"compose.yaml": text} | ({"Dockerfile": _DOCKERFILE} if facts.reducer else {})


def kubernetes(facts: LoadFacts) -> dict[str, str]:
    """`kubernetes.yaml`: a Deployment and a Service."""
    build = _BUILD if facts.reducer else ""
    head = _KUBERNETES.format(name=facts.name, resource=facts.resource, nowhere=NOWHERE, image=build)
    label = {"app.kubernetes.io/name": facts.resource}
    metadata = {"name": facts.resource, "labels": label}
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": "8000", "prometheus.io/path": "/metrics"}
    claim = {"claimName": f"{facts.resource}-files", "readOnly": True}
    volumes = [
        {"name": "model", "persistentVolumeClaim": claim},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
    ]
    health: dict[str, Any] = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5}
    gpus = {"nvidia.com/gpu": facts.gpus}
    variables = [{"name": key, "value": value} for key, value in vllm.environment(facts).items()]
    container: dict[str, Any] = {
        "name": "vllm",
        "image": image(facts),
        "command": arguments(facts),
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
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": label},
            "strategy": {"type": "Recreate"},  # a second replica would wait for a GPU that the first one holds
            "template": {
                "metadata": {"labels": label, "annotations": scraped},
                "spec": {"containers": [container], "volumes": volumes},
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": label, "ports": [{"name": "http", "port": 8000, "targetPort": "http"}]},
    }
    return {"kubernetes.yaml": head + documents(deployment, service)}


def triton(facts: LoadFacts) -> dict[str, str]:
    """A folder for `tritonserver --model-repository` of one model; the checkpoint is expected at `/model`."""
    settings = {"model": "/model", **vllm.settings(facts), "max_model_len": -1, "disable_log_stats": False}
    folder = f"triton/{facts.resource}"
    return {
        f"{folder}/config.pbtxt": _PBTXT.format(name=facts.resource),
        f"{folder}/1/model.json": json.dumps(settings, indent=2) + "\n",
    }


def triton_command(facts: LoadFacts) -> str:
    """The line that starts it in a container; the version of the image is left to the user."""
    variables = "".join(f" -e {key}={value}" for key, value in vllm.environment(facts).items())
    start = "tritonserver --model-repository /model/serve/triton"
    start = f"sh -c 'pip install vlmcompress && {start}'" if facts.reducer else start
    place = "nvcr.io/nvidia/tritonserver:$TRITON-vllm-python-py3"
    return f'docker run --gpus all --rm --shm-size 2g -p 127.0.0.1:8000:8000{variables} -v "$PWD":/model:ro {place} {start}'
