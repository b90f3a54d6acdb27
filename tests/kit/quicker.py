"""What takes a good part of the tests' time and shows nothing, done once or not at all in the processes that tests run in."""

from __future__ import annotations

import gc
import mmap
import os
import re
import sys
import types
from functools import cache, partial
from typing import Any


def import_less() -> None:
    """To be called before transformers is imported, a quarter of which is scikit-learn, pandas and SciPy, for a kind of
    speculative decoding and for losses of detectors."""
    import transformers.utils
    from transformers.utils import import_utils

    for name in ("is_sklearn_available", "is_scipy_available"):
        for module in (transformers.utils, import_utils):
            setattr(module, name, lambda: False)


def freeze(*, engines: bool = False) -> None:
    """To be called when all is imported, and before vLLM's first engine. `engines`: whether the process will start some."""
    os.fsync = lambda descriptor: None  # files of tests need not outlast a power cut
    vars(re)["_MAXCACHE"] = 2**16  # names of tensors are looked for by more patterns than are kept
    if "torch" in sys.modules:
        _float_products()
        _no_values_on_meta()
    if "transformers" in sys.modules:
        from transformers import BaseImageProcessor, GenerationConfig, PreTrainedConfig, ProcessorMixin

        for kind in (BaseImageProcessor, GenerationConfig, PreTrainedConfig, ProcessorMixin):
            kind.__repr__ = object.__repr__  # each that is read is put into a message for nobody
    if "lm_eval" in sys.modules:
        _few_tasks()
    if "vllm" in sys.modules:
        _look_once(engines)
    gc.freeze()  # imported code stays: the garbage collector need not look through it
    if "vllm" in sys.modules:
        gc.freeze = gc.unfreeze = lambda: None  # or each end of an engine would undo that


@cache
def _float_products() -> None:
    """Where a CPU has no instructions for products of bfloat16, which torch emulates in ten times as long, its kernels for them
    compute in float32 and round the result, as such instructions do. Whoever calls them sees bfloat16 before and after."""
    import torch

    from vlmcompress.models.devices import emulated

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value

    def replace(name: str) -> None:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def product(keys: Any, first: torch.Tensor, *others: Any) -> torch.Tensor:
            if first.dtype != torch.bfloat16:
                return kernel.call_boxed(keys, first, *others)
            return kernel.call_boxed(keys, *map(wide, (first, *others))).bfloat16()

        library.impl(name, product, "CPU", with_keyset=True)

    if emulated(torch.bfloat16):
        library = torch.library.Library("aten", "IMPL")
        for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_slow_conv2d_forward", "slow_conv3d_forward"):
            replace(name)
        _kept.append(library)


@cache
def _no_values_on_meta() -> None:
    """Torch computes in Python what a layer on the meta device would be initialized with."""
    from torch.nn import init

    for name, fill in list(vars(init).items()):
        if name.endswith("_") and not name.startswith("_"):
            setattr(init, name, lambda tensor, *a, fill=fill, **k: tensor if tensor.is_meta else fill(tensor, *a, **k))


@cache
def _few_tasks() -> None:
    """Of its own 14,000 task files, which lm-eval reads before it knows a name, those of one data set."""
    from lm_eval.tasks._index import TaskIndex

    files = TaskIndex._iter_yaml_files
    TaskIndex._iter_yaml_files = staticmethod(lambda root: files(root / "gsm8k" if (root / "gsm8k").is_dir() else root))


_kept: list[Any] = []  # what would undo its changes when it is freed


def _look_once(engines: bool) -> None:
    """What vLLM does at each start of an engine, once: on a CPU, look for kernels in all modules. And what it does in a process
    of its own, which has to import vLLM, here: look at each model class that it has not seen on this machine. And of the
    gigabyte for keys and values, let the system zero what is used."""
    import torch
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.v1.worker import utils

    registry._run_in_subprocess = lambda look: look()
    if current_platform.is_cpu():
        look = cache(current_platform.register_triton_kernel_overrides)
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: look())
        if engines:  # in a process that is forked, before that
            look()
        utils.torch = types.ModuleType("torch")
        vars(utils.torch).update(__getattr__=partial(getattr, torch), zeros=_zeros)


def _zeros(*size: Any, **options: Any) -> Any:
    """`torch.zeros`, whose bytes take no time and memory before they are used."""
    import torch

    if options.get("dtype") != torch.int8:
        return torch.zeros(*size, **options)
    return torch.frombuffer(mmap.mmap(-1, *size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.int8)
