"""Every scheme of a shape loaded by vLLM: which kernel runs which layer, and whether `recipe.targets` says so.

The checkpoints are shallow: a kernel is chosen by a layer's type and shape, not by the number of layers. Several engines run
at a time, each a process of its own. What the target refuses is left out and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpu import shapes
from gpu.engine import probe
from gpu.machine import target_here
from gpu.part import Failed, Place
from gpu.steps import SCHEMES

# A word of a target's `kernels` -> its classes in vLLM 0.32, and our plugin's replacements (`_cpu`).
CLASSES = {
    "Marlin": r"Marlin\w*Kernel",
    "Machete": r"MacheteLinearKernel",
    "Humming": r"Humming\w*Kernel",
    "CUTLASS INT8": r"CutlassInt8ScaledMMLinearKernel",
    "CUTLASS FP8": r"CutlassFP8ScaledMMLinearKernel",
    "CUTLASS block FP8": r"CutlassFp8BlockScaledMMKernel",
    "DeepGEMM": r"DeepGemmFp8BlockScaledMMKernel",
    "FlashInfer FP8": r"FlashInferFP8ScaledMMLinearKernel",
    "FlashInfer CuteDSL": r"FlashInferCuteDslNvFp4\w*Kernel|FlashInferCutedslMxfp8LinearKernel",
    "FlashInfer CUTLASS": r"FlashInferCutlass(NvFp4|Mxfp8)LinearKernel",
    "FlashInfer MXFP4": r"FlashInferMxFp4LinearKernel",
    "CUTLASS W4A8": r"CutlassW4A8LinearKernel",
    "Triton": r"Triton\w*Kernel",
    "skinny GEMM": r"ROCmFP8ScaledMMLinearKernel",
    "emulation": r"Emulation(NvFp4|Mxfp8)LinearKernel",
    "Dynamic4bit": r"Dynamic4bitLinearKernel",
    "CPUWNA16": r"CPUWNA16LinearKernel",
    "oneDNN": r"CPUInt8ScaledMMLinearKernel",
    "torch._scaled_mm": r"\w*TorchFP8ScaledMMLinearKernel|Fp8In16BitsLinearKernel",
}
AT_A_TIME = 3


def run(place: Place, shape: str) -> dict[str, Any]:
    """Load every scheme. Raises `Failed` if one does not load, or runs in a kernel that its target does not name."""
    from vlmcompress.recipe import targets

    machine = targets.get_target(target_here())
    schemes: dict[str, Any] = {}
    expected: dict[str, str] = {}
    for name in SCHEMES:
        key = format_key(name)
        if problem := machine.format_problem(key):
            schemes[name] = {"format": key, "refused": problem}
        elif not (place.tiny and key in expected.values()):  # on a CPU one scheme of a format is enough
            expected[name] = key
    folders = {name: checkpoint(place, shape, name) for name in expected}
    for name, loaded in ask(place, shape, folders).items():
        schemes[name] = judged(expected[name], str(machine.kernel(expected[name])), loaded)
    schemes = {name: schemes[name] for name in SCHEMES if name in schemes}
    result = {"target": target_here(), "schemes": schemes}
    wrong = [f"{name}: {problem}" for name, scheme in schemes.items() for problem in scheme.get("wrong", ())]
    if wrong:
        raise Failed("\n".join(wrong), result)
    return result


def format_key(name: str) -> str:
    """The format of a scheme, as targets name it."""
    from vlmcompress.recipe import targets
    from vlmcompress.utils import registry

    scheme, options = SCHEMES[name]
    module = registry.SCHEMES.get(scheme)
    return targets.format_key(module.scheme(module.OPTIONS(**options)))


def checkpoint(place: Place, shape: str, name: str) -> Path:
    """The shallow checkpoint of a scheme, its files examined when it is made."""
    from vlmcompress.evaluation.doctor.files import diagnose

    scheme, options = SCHEMES[name]
    folder = shapes.quantized(place, shape, "shallow", scheme, options, name)
    checks = diagnose(folder, folder.with_name("bf16"))
    if wrong := [f"{check.name}: {check.detail}" for check in checks if not check.ok]:
        raise Failed("\n".join([f"{name}: the files are not as they should be", *wrong]))
    return folder


def ask(place: Place, shape: str, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Ask all checkpoints in vLLM, a few at a time."""
    image, names = pictures(place)[0], list(folders)
    results: dict[str, dict[str, Any]] = {}
    for first in range(0, len(names), AT_A_TIME):
        logs = {name: place.work / "logs" / f"probe-{shape}-{name}.log" for name in names[first : first + AT_A_TIME]}
        running = {
            name: probe.start(folders[name], log, [image], shapes.QUESTION, **probe.options_for(0.1))
            for name, log in logs.items()
        }
        results |= {name: probe.finish(child, logs[name]) for name, child in running.items()}
    return results


def pictures(place: Place) -> list[Path]:
    """Pictures to ask about: those of the calibration data."""
    return sorted(shapes.calibration(place).parent.glob("*.png"))[:4]


def judged(key: str, expected: str, loaded: dict[str, Any]) -> dict[str, Any]:
    """What was seen of one scheme, with what is wrong about it.

    Args:
        key: its format, as targets name it.
        expected: the target's words for the kernel.
    """
    about = {"format": key, "expected": expected, "logged": loaded["logged"]}
    if "error" in loaded:
        return {**about, "wrong": ["vLLM does not load it: " + " | ".join(loaded["error"])]}
    kernels: dict[str, list[str]] = {}
    for layer, layer_kernels in loaded["layers"].items():
        for kernel in layer_kernels:
            kernels.setdefault(kernel, []).append(layer)
    about, wrong = {**about, "kernels": kernels}, []
    if not kernels:
        wrong.append("no layer has a kernel; was it loaded quantized?")
    if strange := sorted(kernel for kernel in kernels.keys() | loaded["logged"].keys() if not fits(expected, kernel)):
        wrong.append(f"runs in {', '.join(strange)}, recipe.targets says {expected}")
    return {**about, **({"wrong": wrong} if wrong else {})}


def fits(expected: str, kernel: str) -> bool:
    """Whether a class of vLLM is among those of a target's words."""
    return any(re.fullmatch(pattern, kernel) for pattern in patterns(expected))


def patterns(expected: str) -> Iterable[str]:
    """Patterns of the classes of a target's words."""
    return [pattern for word, pattern in CLASSES.items() if word in expected]
