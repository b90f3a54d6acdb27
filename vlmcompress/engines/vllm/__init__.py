"""vLLM as an engine, in a process of its own.

`runner` starts `worker` in the engine's process and reads answers from it; `serve` replaces this process by vLLM's own
OpenAI-compatible server. The engine's interpreter is `VLMCOMPRESS_ENGINE_PYTHON`, by default the one that runs this.
`worker`, `server` and `offline` import only the standard library and vLLM, so nothing of ours need be installed there.
"""

from __future__ import annotations

import os
import shutil
import sys

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
    wanted = os.environ.get(PYTHON_VARIABLE) or sys.executable
    found = shutil.which(wanted)
    if found is None:
        raise UserError(f"{PYTHON_VARIABLE}={wanted} is not an executable; point it to the Python that has vLLM")
    return found


def environment(**more: str) -> dict[str, str]:
    """This process's environment with the engine's defaults (and `more`) filled in where nothing is set."""
    return {**ENVIRONMENT, **more, **os.environ}
