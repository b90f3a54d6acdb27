"""GPUs that can't be used are one line each; the machine is pretended, by what torch says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision  # noqa: F401 - looks for CUDA when it is imported

from tests.kit.command_line import loud, run  # noqa: F401 - a fixture
from tests.kit.places import DEMO_LLAVA
from vlmcompress.utils import gpu

CODES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
# What torch 2.14 says on such machines (c10/cuda/CUDAFunctions.cpp, THCGeneral).
OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and "
    "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)
NONE = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from\nhttp://x"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend a torch for CUDA, on a machine with a GPU of a capability and memory, or without; `failure`: torch's words."""

    def pretend(capability: tuple[int, int] = (9, 0), gigabytes: float = 80, failure: str = "") -> None:
        def init() -> None:
            raise RuntimeError(failure)

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        facts = {
            "is_available": lambda: not failure,
            "init": init,
            "get_device_capability": lambda *_: capability,
            "get_device_name": lambda *_: "Pretended GPU",
            "get_arch_list": lambda: CODES,
            "get_device_properties": lambda *_: SimpleNamespace(total_memory=int(gigabytes * 2**30)),
        }
        for name, fact in facts.items():
            monkeypatch.setattr(torch.cuda, name, fact)

    return pretend


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 3), (12, 1), (13, 0)])
def test_generations_that_torch_has_code_for(machine: Any, capability: tuple[int, int]) -> None:
    """Code of the same generation, up to the GPU's own capability; PTX of the newest for those to come."""
    machine(capability)
    assert gpu.gpu_problem() is None and gpu.engine_problem(DEMO_LLAVA) is None


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (11, 0)])
def test_another_generation(machine: Any, capability: tuple[int, int]) -> None:
    machine(capability)
    problem = gpu.gpu_problem() or ""
    assert f"no code for Pretended GPU (compute capability {capability[0]}.{capability[1]}), only for sm_75" in problem
    assert problem.endswith(gpu.ON_CPU) and "\n" not in problem
    assert (gpu.engine_problem(DEMO_LLAVA) or "") == problem.removesuffix(f"; {gpu.ON_CPU}")


def test_code_for_one_capability_alone() -> None:
    assert [gpu._runs("sm_90a", capability) for capability in ((9, 0), (9, 1))] == [True, False]
    assert [gpu._runs("compute_80", capability) for capability in ((7, 5), (8, 0), (9, 0))] == [False, True, True]


def test_an_old_driver(machine: Any) -> None:
    machine(failure=OLD)
    problem = gpu.gpu_problem() or ""
    assert problem.startswith("The NVIDIA driver on your system is too old (found version 11040); update it")
    assert gpu.ON_CPU in problem and gpu.ON_CPU not in (gpu.engine_problem(DEMO_LLAVA) or gpu.ON_CPU)


def test_no_gpu_is_a_problem_of_engines_alone(machine: Any) -> None:
    machine(failure=NONE)
    assert gpu.gpu_problem() is None
    assert (
        "torch finds none (Found no NVIDIA driver on your system); use another" in gpu.engine_problem(DEMO_LLAVA) or ""
    )


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus(machine: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Whoever hides them wants a CPU to compute, which an engine for GPUs does not."""
    machine((7, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpu.gpu_problem() is None
    problem = gpu.engine_problem(DEMO_LLAVA) or ""
    assert problem.startswith(f"CUDA_VISIBLE_DEVICES={value} hides all GPUs") and "unset it" in problem


def test_weights_larger_than_the_gpu(machine: Any, tmp_path: Path) -> None:
    with open(tmp_path / "model.safetensors", "wb") as weights:
        weights.truncate(16 * 10**9)  # sparse
    for gigabytes, flags, refused in ((24, [], False), (8, [], True), (8, ["--tensor-parallel-size=4"], False)):
        machine(gigabytes=gigabytes)
        problem = gpu.engine_problem(tmp_path, flags) or ""
        assert ("are 16.0 GB, and Pretended GPU has 8.6 GB; quantize to fewer bits" in problem) is refused


def test_a_fork_computes_the_engines_problem(machine: Any) -> None:
    machine()
    assert gpu.forked_engine_problem(DEMO_LLAVA) is None
    machine((7, 0))
    assert gpu.forked_engine_problem(DEMO_LLAVA) == gpu.engine_problem(DEMO_LLAVA) != ""


def test_this_torch_has_no_problem() -> None:
    assert torch.version.cuda or (gpu.gpu_problem() is None and gpu.engine_problem(DEMO_LLAVA) is None)


@pytest.mark.parametrize(
    ("kind", "said"),
    [({"capability": (7, 0)}, "no code for Pretended GPU"), ({"failure": OLD}, "driver on your system is too old")],
)
def test_quantize_refuses_them_before_it_writes(
    machine: Any, kind: dict, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(**kind)
    code, _, stderr = run(capsys, "quantize", DEMO_LLAVA, "-o", tmp_path / "out", "--scheme", "fp8")
    assert (code, stderr.count("\n")) == (2, 1) and stderr.startswith("error: ") and said in stderr
    assert list(tmp_path.iterdir()) == []


SERVER = """
import importlib, os, runpy, sys, torch
from types import SimpleNamespace
{machine}
importlib.import_module("vllm.platforms").current_platform = SimpleNamespace(is_cpu=lambda: False)
sys.argv = ["server.py", {model!r}, "--port", "1"]
runpy.run_path({server!r}, run_name="__main__")
"""


@pytest.mark.engine
def test_a_server_ends_with_the_line(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vlmcompress.engines.vllm.serve import SERVER as path

    code = SERVER.format(machine="torch.version.cuda = '13.0'", model=str(DEMO_LLAVA), server=str(path))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: CUDA_VISIBLE_DEVICES= hides all GPUs"), done.stderr
