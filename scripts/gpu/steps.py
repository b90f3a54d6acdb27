"""The steps of a check, as data: what each proves, what it needs, its parts and about how long they take on an H200.

A part is run in a process of its own and recorded when it is done, so it is what a later call goes on behind. The minutes
are estimates until a GPU has run them; together they are to stay within 40.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHAPES = ("qwen2.5-vl-7b", "qwen3-vl-8b")
FREE = ("fp8", "w8a16", "rtn")  # schemes that need no calibration data, and get none
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
}
SERVED = ("bf16", "fp8", "int8", "awq")
PIECES = {"quick": 0.7, **{f"models-{n}-2": 1.2 for n in (1, 2)}, **{f"engines-{n}-3": 1.5 for n in (1, 2, 3)}}
MODELS = ("torch", "transformers", "pydantic", "PIL")
QUANTIZES = (*MODELS, "compressed_tensors")
ENGINE = (*QUANTIZES, "vllm")


@dataclass(frozen=True)
class Part:
    """One process of a step. `arguments` are those of the step's `run`; `minutes`: about how long it takes on an H200."""

    name: str
    minutes: float
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        proves: one line for `--list`.
        module: the module whose `run(place, **arguments)` a part calls, or that of MODULE:FUNCTION; it returns plain data.
        needs: packages that the Python which runs it must have.
        gpu: whether it needs a GPU; not asked with `--tiny`.
        counted: whether its minutes count towards the 40.
        limit: seconds after which a part is ended; commands on a lent machine end after 600.
    """

    name: str
    proves: str
    module: str
    parts: Sequence[Part]
    needs: Sequence[str] = ()
    gpu: bool = True
    counted: bool = True
    limit: float = 570.0

    @property
    def minutes(self) -> float:
        """About how long all parts take on an H200."""
        return sum(part.minutes for part in self.parts)


def _quantize(shape: str, minutes: Mapping[str, float]) -> Step:
    parts = [Part(name, minutes.get(name, minutes[""]), {"shape": shape, "name": name}) for name in SCHEMES]
    return Step(
        f"quantize-{shape}", f"every scheme, {shape}: time by phase, peak memory", "gpu.quantizing", parts, QUANTIZES
    )  # fmt: skip


def _each_shape(name: str, proves: str, module: str, minutes: float) -> Step:
    return Step(name, proves, module, [Part(shape, minutes, {"shape": shape}) for shape in SHAPES], ENGINE)


STEPS: tuple[Step, ...] = (
    Step(
        "setup", "scripts/setup makes the environment for CUDA", "gpu.setting_up", [Part("venv", 8)],
        counted=False, limit=1800,
    ),
    Step(
        "environment", "GPU, driver and versions; torch computes on the GPU", "gpu.environment", [Part("here", 0.3)],
        ("torch",),
    ),
    Step(
        "transformers-only", "calibrating without vLLM: time and memory", "gpu.quantizing:without_engine",
        [Part("calibrate", 0.8)], QUANTIZES,
    ),
    _each_shape("kernels", "vLLM loads every scheme and runs the kernels that targets/ names", "gpu.kernels", 1.5),
    Step(
        "humming", "2- and 3-bit layers run in Humming and answer as in transformers", "gpu.answers:narrow",
        [Part(f"{bits}-bit", 0.7, {"bits": bits}) for bits in (2, 3)], ENGINE,
    ),
    Step(
        "kv-cache", "an FP8 KV cache answers as BF16 and holds twice as much", "gpu.answers:kv_cache", [Part("fp8", 1)], ENGINE,
    ),
    _each_shape("parity", "a reduced model answers in vLLM as in transformers (doctor)", "gpu.answers:parity", 1.5),
    _quantize("qwen2.5-vl-7b", {"": 1.2, "fp8": 0.9, "w8a16": 0.9, "rtn": 0.9}),
    _quantize("qwen3-vl-8b", {"": 0.6, "fp8": 0.4, "w8a16": 0.4, "rtn": 0.4}),
    Step(
        "serve", "TTFT, requests/s and concurrency at all, half and a quarter of the tokens", "gpu.serving",
        [Part(scheme, 1.8, {"scheme": scheme}) for scheme in SERVED], (*ENGINE, "aiohttp"),
    ),
    Step(
        "tests", "the default test suite", "gpu.suite",
        [Part(piece, minutes, {"piece": piece}) for piece, minutes in PIECES.items()],
        (*ENGINE, "llmcompressor", "pytest", "hypothesis", "jaxtyping", "beartype", "lm_eval"),
    ),
)  # fmt: skip


def names(steps: Sequence[Step]) -> list[str]:
    """Names of all parts, `STEP/PART`, in order."""
    return [f"{step.name}/{part.name}" for step in steps for part in step.parts]
