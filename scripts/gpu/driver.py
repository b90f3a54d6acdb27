"""Run the remaining parts, each in its own process, and record each when it is done.

A part that can't run here is recorded as skipped, with the reason, and is tried again by the next call. One that fails, or
takes longer than four times its minutes and one, or than its step's limit, is recorded with its last lines, and the others
go on. One that was killed with the check is not recorded: the next call runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import machine, record
from gpu.part import last_lines
from gpu.steps import Part, Step

TINY_LIMIT = 2400.0  # seconds of a part with tiny shapes, on a CPU that others may use
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Check:
    """Settings of a call.

    Attributes:
        results: file of results.
        work: folder for models, checkpoints and logs.
        site: folder of packages that the steps find before those that are installed (`wheels`); None: there is none.
        interpreter: the Python named for the steps; None: the checkout's environment or this one.
        limit: minutes after which no part starts; one that is not expected to end before is left. None: no limit.
        again: names of steps and parts to run although they are done.
    """

    results: Path
    work: Path
    tiny: bool = False
    interpreter: str | None = None
    limit: float | None = None
    again: Sequence[str] = ()
    site: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the steps."""
        paths = [
            str(self.site or ""),
            str(machine.ROOT / "scripts"),
            str(machine.ROOT),
            os.environ.get("PYTHONPATH", ""),
        ]
        named = (
            {"VLMCOMPRESS_CHECK_PYTHON": self.interpreter} if self.interpreter else {}
        )  # `gpu.engine.setting_up` reads it
        return {**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **named}


def run(check: Check, steps: Sequence[Step]) -> list[str]:
    """Run the remaining parts of some steps. Returns the parts for which no time was left; raises `record.Broken`."""
    began, gpu, left = time.monotonic(), machine.gpu(), []
    device = gpu.name if gpu else machine.CPU
    for step in steps:
        for part in step.parts:
            name = f"{step.name}/{part.name}"
            again = {name, step.name} & set(check.again)
            if not again and record.done(record.read(check.results), name, device):
                continue
            minutes = (time.monotonic() - began) / 60 + part.minutes
            reason = unable(check, step, part, gpu is not None)
            if reason is None and check.limit is not None and minutes > check.limit:
                left.append(name)
                continue
            start = time.monotonic()
            outcome = {"status": "skipped", "reason": reason} if reason else one(check, step, part)
            about = {"seconds": round(time.monotonic() - start, 1), "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
                     "device": device, "commit": commit()}  # fmt: skip
            record.add(check.results, name, {**about, **outcome})
            say(name, {**about, **outcome})
    return left


def unable(check: Check, step: Step, part: Part, gpu: bool) -> str | None:
    """The one-line reason why a part can't run here; None if it can."""
    if step.gpu and not gpu and not check.tiny:
        return "no NVIDIA GPU: nvidia-smi names none"
    interpreter = machine.python(check.interpreter)
    if absent := machine.missing(interpreter, part.needs, check.environment):
        return f"{interpreter} lacks {', '.join(absent)}; {machine.remedy(absent)}"
    return None


def one(check: Check, step: Step, part: Part) -> dict[str, Any]:
    """Run a part; returns its status with result, reason or error."""
    logs, seconds = check.work / "logs", TINY_LIMIT if check.tiny else min(step.limit, 60 + 240 * part.minutes)
    logs.mkdir(parents=True, exist_ok=True)
    log, out = logs / f"{step.name}-{part.name}.log", logs / f"{step.name}-{part.name}.json"
    out.unlink(missing_ok=True)
    command = [machine.python(check.interpreter), "-m", "gpu.part", step.module, json.dumps(dict(part.arguments)),
               str(out), str(check.work), "tiny" if check.tiny else "full"]  # fmt: skip
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command, cwd=machine.ROOT, env=check.environment, stdin=subprocess.PIPE, stdout=sink, stderr=sink,
            start_new_session=True,
        )  # fmt: skip
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"status": "failed", "error": [f"not done after {seconds / 60:g} minutes", *_words(log, 4)]}
        finally:
            _end(child)
    if out.is_file():
        return json.loads(out.read_text(encoding="utf-8"))
    ending = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
    return {"status": "failed", "error": [f"its process ended with {ending}", *_words(log)]}


def _end(child: subprocess.Popen) -> None:
    """End a part's process and its children: its session by a signal, engines in other sessions by their lifelines."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(3)
    if child.stdin:
        child.stdin.close()


def _words(log: Path, most: int = 8) -> list[str]:
    return last_lines(log.read_text(encoding="utf-8", errors="replace"), most)


def commit() -> str:
    """The short commit of the checkout; empty if git fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(machine.ROOT), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return ""


def say(name: str, outcome: dict[str, Any]) -> None:
    """Print a line about a finished part, with its summary."""
    print(f"{name}: {outcome['status']}, {outcome['seconds']:.0f} s", flush=True)
    lines = [outcome["reason"]] if "reason" in outcome else outcome.get("error", [])
    for line in lines:
        print(f"    {line}", flush=True)
