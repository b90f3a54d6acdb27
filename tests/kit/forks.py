"""A Python that has imported its libraries already: each process that it starts is a fork of one that has.

Importing torch and transformers takes 5 s, vLLM 15 s, and the tests start some fifty processes. `python(...)` is the path of
a program that is called as `python` is (`-m MODULE`, `-c CODE` or FILE.py, then arguments) and does the same: with the
caller's environment, folder, streams, niceness and ignored signals, in a process of its own, which gets the caller's signals,
whose exit code or signal is the program's own, and which ends when the program is killed. What libraries read of the
environment when they are imported is what this process had when `python` was first called, so that a test of such settings
needs a real interpreter; so does one of what is imported, or of sessions of processes.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.kit.places import ROOT

OURS = (
    *("vlmcompress.commands.quantize", "vlmcompress.commands.calibrate", "vlmcompress.runs.quantize"),
    *("vlmcompress.runs.recover", "vlmcompress.runs.learn_reducer"),
    *(
        "vlmcompress.evaluation.ask",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.processing_auto",
    ),
    *("transformers.models.llava.modeling_llava", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"),
)
VLLM = (
    *("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"),
    *("vllm.model_executor.models.llava", "vllm.model_executor.models.qwen2_5_vl"),
)
SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
PROGRAM = """#!/bin/sh
case "$1" in
  -m | -c | *.py) exec "{python}" -IS "{caller}" "{address}" {parent} "$@" ;;
  *) exec "{python}" "$@" ;;
esac
"""


@cache
def python(*modules: str) -> str:
    """Path of such a Python, with these modules (`OURS` or `VLLM`) imported. One for each test process."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    address, program = folder / "socket", folder / "python"
    environment = os.environ | SETTINGS | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "tests.kit.forks_parent", str(address), *modules]
    with (folder / "log").open("wb") as log:
        parent = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
    atexit.register(_end, parent, folder)
    caller = Path(__file__).with_name("forks_caller.py")
    program.write_text(PROGRAM.format(python=sys.executable, caller=caller, address=address, parent=parent.pid))
    program.chmod(0o755)
    return str(program)


def _end(parent: subprocess.Popen, folder: Path) -> None:
    parent.kill()
    parent.wait()
    shutil.rmtree(folder, ignore_errors=True)
