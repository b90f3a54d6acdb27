"""vLLM as an engine, in a process of its own.

    run = ENGINE.answer(model_folder, requests, media=folder_of_images)
    run.answers["sample-1"].text

`ENGINE` runs `worker` in the engine's process and reads answers from it; `serve` starts vLLM's own OpenAI-compatible server;
`conformance` finds out whether vLLM serves a checkpoint as transformers does. The engine's interpreter is
`VLMCOMPRESS_ENGINE_PYTHON`, by default the one that runs this. `worker`, `server`, `offline` and `conformance_worker` import
only the standard library and vLLM, so nothing of ours need be installed there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from vlmcompress.engines.local import Local
from vlmcompress.errors import UserError

PYTHON_VARIABLE = "VLMCOMPRESS_ENGINE_PYTHON"
# Set unless the user has set them. The VLLM_CPU_* ones mean nothing to a GPU build.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # share the machine instead of pinning its first cores
    "TOKENIZERS_PARALLELISM": "false",
}


def interpreter() -> str:
    """Absolute path of the engine's Python."""
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    path = shutil.which(python)
    if path is None:
        raise UserError(f"{PYTHON_VARIABLE}={python} is not an executable; point it to the Python that has vLLM")
    return path


def available() -> bool:
    """Whether the engine's Python has vLLM; it is not imported."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([interpreter(), "-c", probe], stderr=subprocess.DEVNULL).returncode == 0


def environment(**defaults: str) -> dict[str, str]:
    """This process's environment with the engine's defaults (and `defaults`) filled in where nothing is set."""
    return {**ENVIRONMENT, **defaults, **os.environ}


ENGINE = Local(
    name="vllm",
    title="vLLM",
    module=Path(__file__).with_name("worker.py"),
    interpreter=interpreter,
    environment=lambda: environment(VLLM_LOGGING_LEVEL="WARNING", VLLM_ENABLE_V1_MULTIPROCESSING="0"),
    advice=f"install vlmcompress[serve] (GPU) or [serve-cpu] there, or point {PYTHON_VARIABLE} to a Python that has it",
    videos=True,
)
