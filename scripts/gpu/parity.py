"""A reduced model of full width in vLLM against transformers: the checks of `vlmcompress doctor --engine vllm`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from gpu import shapes
from gpu.part import Failed, Place, last_lines

REDUCE = "dart:0.5"
PROMPTS = 8


def run(place: Place, shape: str) -> dict[str, Any]:
    """Ask the engine. Failed where a check does."""
    folder = shapes.reduced(shapes.model(place, shape, "shallow"), REDUCE)
    command = [sys.executable, "-m", "vlmcompress", "doctor", str(folder), "--engine", "vllm", "--json"]
    done = subprocess.run([*command, "--prompts", str(PROMPTS)], capture_output=True, text=True, check=False)
    print(done.stderr)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise Failed("\n".join(["doctor gave no answer", *last_lines(done.stderr, 4)])) from None
    if "checks" not in report:
        raise Failed(str(report.get("error") or report))
    checks = {check["name"]: {"ok": check["ok"], "detail": check["detail"]} for check in report["checks"]}
    result = {"reduce": REDUCE, "prompts": PROMPTS, "checks": checks}
    wrong = [f"{name}: {check['detail']}" for name, check in checks.items() if not check["ok"]]
    if wrong:
        raise Failed("\n".join(wrong), result)
    return result
