"""What takes a good part of the tests' time and shows nothing, done once or not at all in the processes that tests run in."""

from __future__ import annotations

import gc
import os
import sys
from functools import cache


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
    if "transformers" in sys.modules:
        from transformers import PreTrainedConfig

        PreTrainedConfig.__repr__ = object.__repr__  # each config that is read is put into a message for nobody
    if "vllm" in sys.modules:
        _look_once(engines)
    gc.freeze()  # imported code stays: the garbage collector need not look through it
    if "vllm" in sys.modules:
        gc.freeze = gc.unfreeze = lambda: None  # or each end of an engine would undo that


def _look_once(engines: bool) -> None:
    """What vLLM does at each start of an engine, once: on a CPU, look for kernels in all modules. And what it does in a process
    of its own, which has to import vLLM, here: look at each model class that it has not seen on this machine."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    registry._run_in_subprocess = lambda look: look()
    if current_platform.is_cpu():
        look = cache(current_platform.register_triton_kernel_overrides)
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: look())
        if engines:  # in a process that is forked, before that
            look()
