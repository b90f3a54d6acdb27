"""Run as a process of its own, by `pretended.py`: which kernels vLLM picks for layers on machines that are not there.

vLLM decides by its platform object, by what its compiled library says it was built for, and by which packages are installed.
The three are put in place here, in this process only, and everything else is vLLM's: its class of the platform, its reading of
the `quantization_config`, its linear layer, which is made without memory and asked for the kernel that it got. Nothing is
computed.

A line of JSON on stdin, `{"machines": [name, ...], "layers": {name: {"config", "shape"}}}`, gives one on stdout: machine ->
layer -> `{"scheme", "kernel"}`, or `{"error"}` in vLLM's words. A machine is a CUDA capability ("9.0"), AMD's name of an
architecture ("gfx942", the last) or "cpu" (the first), this one without AMX. "9.0 without KERNEL" leaves a kernel out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# The rules of vLLM's `csrc/libtorch_stable/quantization/w8a8/cutlass/scaled_mm_entry.cu` and `.../fp4/nvfp4_scaled_mm_entry.cu`
# for a build of CUDA 13, which is what its wheel is.
COMPILED = {
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_scaled_mm_supports_fp4": lambda capability: capability >= 100,
}
# Packages that vLLM's wheel for CUDA requires or holds (`requirements/cuda.txt`), and the names in them that it looks for.
PACKAGES = {
    "deep_gemm/__init__.py": (),
    "flashinfer_cubin/__init__.py": (),
    "flashinfer/__init__.py": (),
    "flashinfer/cute_dsl/__init__.py": (),
    "flashinfer/gemm/__init__.py": ("mm_bf16_fp4", "prepare_bf16_fp4_weights", "Sm120B12xBlockScaledDenseGemmKernel"),
}
LIBRARIES = ("vllm._C", "vllm._C_stable_libtorch", "vllm._rocm_C")  # platforms load those that are not there
REMEMBERING = type(functools.cache(len))


class Named(type):
    """A class, or a constant of one, of some name."""

    def __getattr__(cls, name: str) -> str:
        return f"{cls.__name__}.{name}"


class Humming(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for the package `humming`, of whose classes vLLM makes descriptions of layers that nobody reads here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self, is_package=True) if name.split(".")[0] == "humming" else None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: Named(name, (), {"__init__": lambda self, **settings: None})  # type: ignore[method-assign]


def main() -> None:
    order = json.loads(sys.stdin.readline())
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM's log goes to stderr
    sys.meta_path.append(Humming())  # vLLM looks for it when it is imported
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors  # noqa: F401

    kernels: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, one_process(Path(folder)):
        for machine in order["machines"]:
            name, _, os.environ["VLLM_DISABLED_KERNELS"] = machine.partition(" without ")
            if name == "cpu":
                torch.cpu._is_amx_tile_supported = lambda: False  # the newest processors have kernels of their own
            else:
                pretend(name, Path(folder))
            kernels[machine] = {name: choice(**layer) for name, layer in order["layers"].items()}
    print(json.dumps(kernels), file=answers, flush=True)


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """What a layer of vLLM asks for when it is made: the config of the engine, and its place among parallel processes."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    config = VllmConfig()
    with set_current_vllm_config(config, check_compile=False):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel()
        text = types.SimpleNamespace(model_type="qwen2_5_vl_text")
        config.model_config = types.SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text)
        torch.set_default_dtype(torch.bfloat16)
        yield


def pretend(machine: str, folder: Path) -> None:
    """Make every module of vLLM that is loaded believe that it runs on a machine."""
    import vllm.platforms

    for library in LIBRARIES:
        sys.modules.setdefault(library, types.ModuleType(library))
    platform = (amd if machine.startswith("gfx") else nvidia)(machine, folder)
    vllm.platforms._current_platform = platform
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "vllm" or module is None:
            continue
        if "current_platform" in vars(module):
            module.current_platform = platform
        for thing in list(vars(module).values()):
            if isinstance(thing, REMEMBERING):  # answers about the machine before
                thing.cache_clear()
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass
    from vllm.model_executor.layers.quantization.utils import w8a8_utils

    cutlass.CUTLASS_BLOCK_FP8_SUPPORTED = w8a8_utils.cutlass_block_fp8_supported()


def nvidia(machine: str, folder: Path) -> Any:
    """vLLM's platform of an NVIDIA GPU of a capability, with the packages of its wheel for CUDA next to it."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        for file, names in PACKAGES.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("".join(f"{name} = None\n" for name in names))
        library = torch.library.Library("_C", "FRAGMENT")
        nvidia.library = library  # its definitions live as long as it does
        for name, answer in COMPILED.items():
            library.define(f"{name}(int capability) -> bool")
            library.impl(name, answer, "CompositeImplicitAutograd")
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    here = DeviceCapability(*map(int, machine.split(".")))

    class Pretended(CudaPlatformBase):
        get_device_capability = classmethod(lambda cls, device_id=0: here)

    return Pretended()


def amd(machine: str, folder: Path) -> Any:
    """vLLM's platform of an AMD GPU of an architecture."""
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    properties = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(gcnArchName=machine)
    try:
        from vllm.platforms import rocm
    finally:
        torch.cuda.get_device_properties = properties
    from vllm.platforms.interface import DeviceCapability

    assert machine == rocm._GCN_ARCH, "one AMD machine a process"
    here = DeviceCapability(*rocm._capability_from_gcn_arch(machine))

    class Pretended(rocm.RocmPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: here)

    return Pretended()


def choice(config: dict[str, Any], shape: tuple[int, int]) -> dict[str, str]:
    """What vLLM makes of a linear layer of `shape` [out, in] in a checkpoint with this `quantization_config`."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    out_features, in_features = shape
    try:
        with torch.device("meta"):
            layer = ReplicatedLinear(
                in_features,
                out_features,
                bias=False,
                params_dtype=torch.bfloat16,
                quant_config=CompressedTensorsConfig.from_config(config),
                prefix="model.layers.0.mlp.down_proj",
            )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    kernels = [type(part) for part in vars(layer.scheme).values() if "kernels.linear" in type(part).__module__]
    (kernel,) = kernels
    return {"scheme": type(layer.scheme).__name__, "kernel": kernel.__name__}


if __name__ == "__main__":
    main()
