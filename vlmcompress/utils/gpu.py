"""Why a program can't compute on this machine's NVIDIA GPU: an old driver, another generation, too little memory.

Imports the standard library, and torch within its functions: vLLM's worker and server load this file by its path, as in their
environment this package need not be installed.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

ON_CPU = "CUDA_VISIBLE_DEVICES= computes on the CPU"
# Flags of vLLM's with which a device holds a part of the weights.
SPREAD = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--cpu-offload-gb", "--offload-backend")


def gpu_problem() -> str | None:
    """Why torch can't use a GPU that is there: its driver is too old, or torch has no code for it; one line with the remedy.

    None where it can, where there is no GPU, where `CUDA_VISIBLE_DEVICES` hides it, and where torch is built for CPUs or AMD.
    """
    problem = None if hidden() else _unusable()
    return problem and f"{problem}; {ON_CPU}"


def _unusable() -> str | None:
    """`gpu_problem` without the way to compute on the CPU, and whatever `CUDA_VISIBLE_DEVICES` says."""
    import torch

    if not torch.version.cuda:
        return None
    if not torch.cuda.is_available():
        failure = _failure()
        remedy = "update it, or install a torch for an older CUDA"
        return f"{failure}; {remedy}" if "driver on your system is too old" in failure else None
    capability = torch.cuda.get_device_capability()
    codes = torch.cuda.get_arch_list()
    if not codes or any(_runs(code, capability) for code in codes):
        return None
    name = f"{torch.cuda.get_device_name()} (compute capability {capability[0]}.{capability[1]})"
    return (
        f"torch {torch.__version__} has no code for {name}, only for {', '.join(codes)}; install a release or a build of "
        "torch that has, or use another GPU"
    )


def engine_problem(folder: str | Path, flags: Sequence[str] = ()) -> str | None:
    """Why an engine that is built for GPUs can't load a checkpoint here: as `gpu_problem`, and also where there is no GPU or a
    variable hides it, and where the weights alone take more than its memory; one line with the remedy.

    Args:
        folder: the checkpoint's.
        flags: of vLLM; with some of `SPREAD` the weights are not measured.
    """
    import torch

    if not torch.version.cuda:
        return None
    cpu_build = "vLLM's CPU build: pip install '.[serve-cpu]'"
    if hidden():
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        return f"CUDA_VISIBLE_DEVICES={value} hides all GPUs, and this vLLM needs one; unset it, or install {cpu_build}"
    if problem := _unusable():
        return problem
    if not torch.cuda.is_available():
        return (
            f"this vLLM needs a GPU, and torch finds none ({_failure()}); use another machine, or install {cpu_build}"
        )
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    memory = torch.cuda.get_device_properties(0).total_memory
    if weights <= memory or any(flag.partition("=")[0] in SPREAD for flag in flags):
        return None
    return (
        f"the weights in {folder} are {weights / 1e9:.1f} GB, and {torch.cuda.get_device_name()} has {memory / 1e9:.1f} GB; "
        "quantize to fewer bits, use a larger GPU, or several: -- --tensor-parallel-size N"
    )


def forked_engine_problem(folder: str | Path, flags: Sequence[str] = ()) -> str | None:
    """`engine_problem` of a fork of this process, in which CUDA then has not begun: vLLM's server would keep a context on the
    GPU that it never uses, and could not fork its engine."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writer, (engine_problem(folder, flags) or "").encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        problem = answer.read().decode()
    os.waitpid(child, 0)
    return problem or None


def hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` names no GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def _failure() -> str:
    """The first sentence of what torch says when it is told to use a GPU; it says so each time, unlike its warning."""
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()).partition(". ")[0]
    return "no CUDA GPUs are available"


def _runs(code: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU runs code of torch's list: machine code of its generation up to its own capability (that with a letter, of
    it alone), or PTX of any earlier one."""
    if not (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", code)):
        return True  # a form that is not known here
    kind, major, minor, letter = match[1], int(match[2]), int(match[3]), match[4]
    if kind == "compute":
        return (major, minor) <= capability
    return (major, minor) == capability if letter == "a" else major == capability[0] and minor <= capability[1]
