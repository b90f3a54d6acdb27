"""What this machine has: its GPU as the driver names it, and the packages of the Python that runs the steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU = "CPU"
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits")
_FIND = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if u.find_spec(n) is None]))"
_BRINGS = {"llmcompressor": "compress", "vllm": "serve", "aiohttp": "eval", "lm_eval": "eval", "pytest": "dev"}


@dataclass(frozen=True)
class Gpu:
    """The first GPU. `memory`: MiB; `capability`: like (9, 0)."""

    name: str
    memory: int
    driver: str
    capability: tuple[int, int]


def gpu() -> Gpu | None:
    """Ask the driver; None where there is none or it can't tell."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True)
        name, memory, driver, capability = (word.strip() for word in done.stdout.splitlines()[0].split(","))
        major, _, minor = capability.partition(".")
        return Gpu(name, int(float(memory)), driver, (int(major), int(minor)))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def python(interpreter: str | None) -> str:
    """The Python that runs the steps: the one named, else the checkout's environment if it is whole, else this one."""
    environment, whole = ROOT / ".venv" / "bin" / "python", ROOT / ".venv" / ".vlmcompress-stamp"
    return interpreter or (str(environment) if environment.exists() and whole.exists() else sys.executable)


def missing(interpreter: str, packages: Iterable[str]) -> list[str]:
    """Packages that a Python does not find, nothing imported. Raises OSError where it is no Python."""
    names = sorted(set(packages))
    done = subprocess.run([interpreter, "-c", _FIND, *names], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{interpreter} is not a Python that works: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def remedy(packages: Iterable[str]) -> str:
    """How to install packages that are missing."""
    extras = sorted({_BRINGS[name] for name in packages if name in _BRINGS})
    return f"scripts/setup, or pip install '.[{','.join(extras)}]'" if extras else "scripts/setup, or pip install ."


def target(name: str, memory: int, capability: tuple[int, int]) -> str:
    """The name in `vlmcompress/targets` of a GPU, by its own name or else by its generation's."""
    words = name.lower().replace(" ", "")
    if "a100" in words:
        return "a100" if memory > 60_000 else "a100-40gb"
    for word, target_name in (("h200", "h200"), ("h100", "h100"), ("gb200", "gb200"), ("b200", "b200"),
                               ("l40s", "l40s"), ("a10g", "a10g"), ("3090", "rtx3090"), ("4090", "rtx4090"),
                               ("5090", "rtx5090"), ("thor", "jetson-thor"), ("orin", "jetson-orin")):  # fmt: skip
        if word in words:
            return target_name
    generations = {(8, 6): "a10g", (8, 7): "jetson-orin", (8, 9): "l40s", (9, 0): "h100", (11, 0): "jetson-thor"}
    newer = "rtx5090" if capability >= (12, 0) else "b200" if capability >= (10, 0) else "a100"
    return generations.get(capability, newer)
