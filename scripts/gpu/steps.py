"""The steps of a check, as data: what each proves, what its parts need, and about how long they take.

A part is run in a process of its own and recorded when it is done, so a later call goes on after it. Steps stand in the
order of what they are worth. Minutes are an H100's where one has run the part, else estimates. Without whole models, which
come last, the tier `bare` fits into `BARE_LIMIT`, as a GPU is lent for minutes; the tier `engine` is to stay within 30.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

BARE_LIMIT = 8.0  # minutes after which the tier `bare` starts no part, unless `--limit` says otherwise
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
    "gptq-plus": ("gptq-plus", {}),
}
SERVED = ("bf16", "fp8", "int8", "awq")
WHOLE = {("qwen2.5-vl-7b", "gptq-plus"): 2.9, ("qwen2.5-vl-7b", "awq"): 2.7, ("qwen2.5-vl-7b", "gptq"): 2.0,
         ("qwen2.5-vl-7b", "fp8"): 0.5, ("qwen3-vl-8b", "awq"): 1.9}  # fmt: skip

INSTALLED = ("torch", "torchvision", "triton", "transformers", "accelerate", "safetensors", "PIL", "yaml", "jinja2",
             "pytest")  # fmt: skip
"""What a bare machine has, with what these need."""
BROUGHT = ("pydantic", "compressed_tensors", "jaxtyping", "beartype", "hypothesis")
"""What `wheels` brings along."""
MODELS = ("torch", "torchvision", "transformers", "accelerate", "safetensors", "PIL", "yaml", "jinja2", "pydantic")
QUANTIZES = (*MODELS, "compressed_tensors")
TESTS = (*QUANTIZES, "pytest", "hypothesis", "jaxtyping", "beartype")
ENGINE = (*QUANTIZES, "vllm")


@dataclass(frozen=True)
class Part:
    """One process of a step.

    Attributes:
        minutes: about how long it takes on an H100 or H200.
        arguments: those of the step's `run`.
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
        module: the module whose `run(place, **arguments)` a part calls, or that of MODULE:FUNCTION; it returns plain data.
        gpu: whether it needs a GPU; not required with `--tiny`.
        limit: seconds after which a part is ended; commands on a lent machine end after 600.
        fetches: whether it fetches packages, which a bare machine can't; its minutes count towards no tier's.
    """

    name: str
    proves: str
    module: str
    parts: Sequence[Part]
    gpu: bool = True
    limit: float = 570.0
    fetches: bool = False

    @property
    def minutes(self) -> float:
        """About how long all parts take."""
        return sum(part.minutes for part in self.parts)


def _each_shape(minutes: float, needs: Sequence[str]) -> list[Part]:
    return [Part(shape, minutes, needs, {"shape": shape}) for shape in SHAPES]


def _each(minutes: Mapping[str, float], needs: Sequence[str], argument: str) -> list[Part]:
    return [Part(name, each, needs, {argument: name}) for name, each in minutes.items()]


STEPS: tuple[Step, ...] = (
    Step(
        "setup", "scripts/setup makes the environment for CUDA", "gpu.engine.setting_up", [Part("venv", 8, ())],
        limit=1800, fetches=True,
    ),
    Step(
        "environment", "GPU, driver and versions; torch computes on the GPU", "gpu.machine:describe",
        [Part("here", 0.2, ("torch",))],
    ),
    Step(
        "products", "what FP8 and INT8 products by torch's own kernels win over BF16", "gpu.bare.products",
        [Part("torch", 0.1, ("torch",))],
    ),
    Step(
        "equal", "quantizers, statistics and reducers give on the GPU what they give on a CPU", "gpu.bare.equal",
        _each({"quantizers": 0.3, "statistics": 0.1, "reducers": 0.2}, MODELS, "what"),
    ),
    Step(
        "triton", "the quantizers' Triton kernels give torch's codes, and in how much less time", "gpu.bare.kernels",
        [Part("solving", 0.4, (*MODELS, "triton"))],
    ),
    Step(
        "layers", "a block's layers by every scheme: seconds by phase, kernels, waits, peak memory", "gpu.bare.layers",
        _each_shape(0.35, QUANTIZES),
    ),
    Step(
        "reducers", "milliseconds and waits of each reducer next to the encoder at 1, 8 and 32 images",
        "gpu.bare.reduced:next_to_encoder", [Part("qwen2.5-vl-7b", 1.2, MODELS)],
    ),
    Step(
        "prefill", "prefill with all, half and a quarter of the visual tokens", "gpu.bare.reduced:prefill",
        [Part("qwen2.5-vl-7b", 1.0, MODELS)],
    ),
    Step(
        "training", "gradient pass, ten steps of recover and learn-reducer, rotation, KV ranges", "gpu.bare.training",
        _each({"gradients": 0.7, "recover": 0.5, "learn-reducer": 0.5, "rotate": 0.4, "kv-cache": 0.5}, QUANTIZES, "what"),
    ),
    Step(
        "tests", "the default test suite", "gpu.bare.suite",
        [*_each({"pure": 0.9, "device": 1.2}, TESTS, "piece"),
         *_each({f"models-{n}-2": 1.2 for n in (1, 2)}, (*ENGINE, *TESTS, "llmcompressor", "lm_eval"), "piece"),
         *_each({f"engines-{n}-3": 1.5 for n in (1, 2, 3)}, (*ENGINE, *TESTS, "llmcompressor", "lm_eval"), "piece")],
    ),
    Step(
        "quantize", "whole models with 128 images of 1000 x 1000: seconds by phase, peak memory", "gpu.bare.whole",
        [Part(f"{shape}-{scheme}", minutes, QUANTIZES, {"shape": shape, "name": scheme})
         for (shape, scheme), minutes in WHOLE.items()],
    ),
    Step(
        "kernels", "vLLM loads every scheme and runs the kernels that recipe.targets names", "gpu.engine.kernels",
        _each_shape(1.5, ENGINE),
    ),
    Step(
        "humming", "2- and 3-bit layers run in Humming and answer as in transformers", "gpu.engine.answers:narrow",
        [Part(f"{bits}-bit", 0.7, ENGINE, {"bits": bits}) for bits in (2, 3)],
    ),
    Step(
        "kv-cache", "an FP8 KV cache answers as BF16 and holds twice as much", "gpu.engine.answers:kv_cache",
        [Part("fp8", 1, ENGINE)],
    ),
    Step(
        "parity", "a reduced model answers in vLLM as in transformers (doctor)", "gpu.engine.answers:parity",
        _each_shape(1.5, ENGINE),
    ),
    Step(
        "serve", "TTFT, requests/s and concurrency at all, half and a quarter of the tokens", "gpu.engine.serving",
        _each(dict.fromkeys(SERVED, 2.2), (*ENGINE, "aiohttp"), "scheme"),
    ),
)  # fmt: skip


def of_tier(tier: str) -> list[Step]:
    """The steps with those of their parts that belong to a tier, `bare` or `engine`."""
    parts = {step.name: [part for part in step.parts if part.tier == tier] for step in STEPS if not step.fetches}
    return [replace(step, parts=parts[step.name]) for step in STEPS if parts.get(step.name)]


def names(steps: Sequence[Step]) -> list[str]:
    """Names of all parts, `STEP/PART`, in order."""
    return [f"{step.name}/{part.name}" for step in steps for part in step.parts]
