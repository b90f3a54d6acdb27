"""Triton Inference Server with its vLLM backend: a model repository of one model, `config.pbtxt` and `model.json`.

Files are those of the backend's sample (triton-inference-server/vllm_backend at 8de0c14, `samples/model_repository`,
`src/model.py`): inputs, outputs and the decoupled policy are filled in by the backend, batching is vLLM's, and
`model.json` holds arguments of vLLM's `AsyncEngineArgs`. The vLLM of the container is meant to be 0.32; older ones
may not know an argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from vlmcompress.export.launch import vllm
from vlmcompress.export.readers import LoadFacts

TITLE = "Triton's vLLM backend"
CHECKED = "model.json read by vLLM 0.32's EngineArgs, config.pbtxt by protobuf's parser in our tests, not run"

ENGINE, GPUS = "vllm", True

_CONFIG = """# {name} in Triton Inference Server, backend vLLM. Written by vlmcompress.
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


def files(facts: LoadFacts) -> Mapping[str, str]:
    """A folder for `tritonserver --model-repository`; the checkpoint is expected at `/model`."""
    settings = {"model": "/model", **vllm.settings(facts), "max_model_len": -1, "disable_log_stats": False}
    folder = f"triton/{facts.resource}"
    return {
        f"{folder}/config.pbtxt": _CONFIG.format(name=facts.resource),
        f"{folder}/1/model.json": json.dumps(settings, indent=2) + "\n",
    }


def command(facts: LoadFacts) -> str:
    """The line that starts it in a container; the version of the image is left to the user."""
    variables = "".join(f" -e {key}={value}" for key, value in vllm.environment(facts).items())
    plugin = "pip install vlmcompress && " if facts.reducer else ""
    inner = f"{plugin}tritonserver --model-repository /model/serve/triton"
    start = f"sh -c '{inner}'" if plugin else inner
    image = "nvcr.io/nvidia/tritonserver:$TRITON-vllm-python-py3"
    return f'docker run --gpus all --rm --shm-size 2g -p 127.0.0.1:8000:8000{variables} -v "$PWD":/model:ro {image} {start}'
