"""vLLM in a container, for Docker Compose; for a checkpoint with a reducer also the Dockerfile that adds the plugin.

`deploy.resources.reservations.devices` is Compose's way to ask for GPUs, `healthcheck` asks vLLM's `/health` with the Python
that the image has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmcompress.export.launch import vllm
from vlmcompress.export.launch._template import documents
from vlmcompress.export.readers import LoadFacts

TITLE = "Docker Compose"
CHECKED = "structure and vLLM's flags checked in our tests, not run"

ENGINE, GPUS = "vllm", True
IMAGE = "vllm/vllm-openai:v0.32.0"
NOWHERE = "none.invalid"  # a host that can't exist (RFC 2606): vLLM fetches any address without a list of allowed hosts
_DOCKERFILE = f"""# vLLM with vlmcompress's plugin, which the checkpoint's reducer needs.
FROM {IMAGE}
# A name in your index, the address of a wheel, or git+https://...
ARG VLMCOMPRESS=vlmcompress
RUN pip install --no-cache-dir "$VLMCOMPRESS"
"""
_HEAD = """# {name} in vLLM, for `docker compose -f serve/compose.yaml up`. Written by vlmcompress.
# Reachable from this machine only: change 127.0.0.1 to publish it, and set --api-key then. Images come within requests;
# to have them fetched from addresses, put the allowed hosts in the place of {nowhere}.
"""


def files(facts: LoadFacts) -> Mapping[str, str]:
    """`compose.yaml`, and `Dockerfile` where the checkpoint carries a reducer."""
    compose = _HEAD.format(name=facts.name, nowhere=NOWHERE) + documents(_compose(facts))
    return {"compose.yaml": compose} | ({"Dockerfile": _DOCKERFILE} if facts.reducer else {})


def command(facts: LoadFacts) -> str:
    """The line that starts it, from the checkpoint's folder."""
    return "docker compose -f serve/compose.yaml up"


def image(facts: LoadFacts) -> str:
    """The container's image: vLLM's own, or the one that `Dockerfile` builds."""
    return f"{facts.resource}-vllm:0.32" if facts.reducer else IMAGE


def arguments(facts: LoadFacts) -> list[str]:
    """The whole command in a container that has the checkpoint at `/model`."""
    address = ["--host", "0.0.0.0", "--port", "8000", "--allowed-media-domains", NOWHERE]
    return ["vllm", "serve", "/model", *vllm.flags(facts), *address]


def _compose(facts: LoadFacts) -> dict[str, Any]:
    program, *flags = arguments(facts)
    gpus = {"driver": "nvidia", "count": facts.gpus, "capabilities": ["gpu"]}
    environment = vllm.environment(facts)
    health = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"
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
            "test": ["CMD", "python3", "-c", health],
            "interval": "10s",
            "timeout": "6s",
            "retries": 3,
            "start_period": "20m",
        },
        "restart": "unless-stopped",
    }
    return {"services": {facts.resource: service}}
