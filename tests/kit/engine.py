"""vLLM in a process of the whole test session: importing it takes longer than a tiny engine, so all tests share one import."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit import forks
from tests.kit.places import EMULATION, ROOT

SETTINGS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in that process, where its model can be looked at
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}


class Process:
    """`engine_worker.py`, with one job at a time. It ends with its parent."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.log = self.folder / "log"
        environment = os.environ | SETTINGS | {"PYTHONPATH": f"{EMULATION}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        command = [forks.python(*forks.VLLM), "-m", "tests.kit.engine_worker"]
        with self.log.open("wb") as sink:
            self.child = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=sink, stderr=sink
            )
        atexit.register(self.close)

    def ask(self, kind: str, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The job's result; `{"error": text}` where it failed."""
        out = self.folder / "result.json"
        out.unlink(missing_ok=True)
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"kind": kind, "job": job, "out": str(out)}).encode() + b"\n")
        self.child.stdin.flush()
        end = time.monotonic() + seconds
        while not out.exists():
            assert self.child.poll() is None and time.monotonic() < end, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.05)
        return json.loads(out.read_text())

    def close(self) -> None:
        """End it, and remove its files."""
        self.child.kill()
        self.child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_running: list[Process] = []


def asked(kind: str, jobs: list[dict[str, Any]], seconds: float = 1800) -> list[dict[str, Any]]:
    """What vLLM makes of each job, one after the other. Kinds are those of `engine_worker.py`; `seconds` is for each."""
    pytest.importorskip("vllm")
    if not _running or _running[0].child.poll() is not None:
        _running[:] = [Process()]
    try:
        return [_running[0].ask(kind, job, seconds) for job in jobs]
    except BaseException:
        _running.pop().close()  # it may still be at the job
        raise
