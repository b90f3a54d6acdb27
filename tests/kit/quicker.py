"""What takes a good part of the tests' time and shows nothing, done once or not at all in the processes that tests run in."""

from __future__ import annotations

import gc
import os
import sys


def freeze() -> None:
    """To be called when all is imported, and before vLLM's first engine."""
    os.fsync = lambda descriptor: None  # files of tests need not outlast a power cut
    if "transformers" in sys.modules:
        from transformers import PreTrainedConfig

        PreTrainedConfig.__repr__ = object.__repr__  # each config that is read is put into a message for nobody
    if "vllm" in sys.modules:
        _replace_kernels()
    gc.collect()
    gc.freeze()  # imported code stays: the garbage collector need not look through it
    if "vllm" in sys.modules:
        gc.freeze = gc.unfreeze = lambda: None  # or each end of an engine would undo that


def _replace_kernels() -> None:
    """What vLLM does on a CPU at each start of an engine, once: look for kernels in all modules."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
