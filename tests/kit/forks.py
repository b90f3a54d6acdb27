"""A Python that has imported its libraries already: each process that it starts is a fork of one that has.

Importing torch and transformers takes 5 s, vLLM 15 s, and the tests start some fifty processes. `python(...)` is the path of
a program that is called as `python` is (`-m MODULE`, `-c CODE` or FILE.py, then arguments) and does the same: with the
caller's environment, folder, streams, niceness and ignored signals, in a process of its own, which gets the caller's signals,
whose exit code or signal is the program's own, and which ends when the program is killed. What libraries read of the
environment when they are imported is what the process had that first called `python` in a test run, so that a test of such
settings needs a real interpreter; so does one of what is imported, or of sessions of processes.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.kit.places import ROOT

OURS = (
    *("vlmcompress.cli.quantize", "vlmcompress.quantization.run"),
    "vlmcompress.training.learn_reducer",
    *(
        "vlmcompress.evaluation.accuracy.ask",
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
RUN = "VLMCOMPRESS_TEST_RUN"  # a process and a folder, see `begin`
PROGRAM = """#!/bin/sh
case "$1" in
  -m | -c | *.py) exec "{python}" -IS "{caller}" "{address}" {parent} "$@" ;;
  *) exec "{python}" "$@" ;;
esac
"""


@cache
def python(*modules: str, path: str = "") -> str:
    """Path of such a Python, with these modules (`OURS` or `VLLM`) imported. Processes of one test run share it.

    `path`: what comes first on its `PYTHONPATH`.
    """
    lifeline, folder = _run()
    place = folder / hashlib.sha256(" ".join([path, *modules]).encode()).hexdigest()[:8]
    place.mkdir(exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = place / "python"
        if not program.exists():
            _start(place, program, lifeline, modules, path)
    return str(program)


def _start(place: Path, program: Path, lifeline: int, modules: Sequence[str], path: str) -> None:
    address = place / "socket"
    folders = filter(None, [path, str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-m", "tests.kit.forks_parent", str(address), str(lifeline), *modules]
    with (place / "log").open("wb") as log:
        parent = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    caller = Path(__file__).with_name("forks_caller.py")
    part = place / "python.part"
    part.write_text(PROGRAM.format(python=sys.executable, caller=caller, address=address, parent=parent.pid))
    part.chmod(0o755)
    part.rename(program)


def begin() -> None:
    """Have this process, and those that it starts, share such Pythons, which end with it."""
    folder = tempfile.mkdtemp(prefix="forks-")
    os.environ[RUN] = f"{os.getpid()} {folder}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _run() -> tuple[int, Path]:
    """The process that began, and its folder."""
    if RUN not in os.environ:
        begin()
    lifeline, folder = os.environ[RUN].split(" ", 1)
    return int(lifeline), Path(folder)
