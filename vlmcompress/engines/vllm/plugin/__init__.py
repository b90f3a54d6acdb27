"""A plugin of vLLM that registers an architecture for each family that can be served with its visual tokens reduced.

vLLM calls `register` in every one of its processes (entry point group `vllm.general_plugins`). vLLM imports a family's module
only when a checkpoint names its architecture, `Vlmcompress` plus the original name (see `reduction.block`). A vLLM without
this plugin has no such architecture and refuses the checkpoint by that name.

`register` also makes vLLM's CPU build read 4-bit weights on a processor without AVX-512, among others (`_cpu`).

Each module here without a leading underscore is a family. It defines, as literals,

    ARCHITECTURE    name of the original architecture
    SIGNALS         fields of `methods.Signals` that it can give a method
    VIDEOS          True if videos are served as well; left out otherwise
    COUNTED         True where a method within the encoder may keep a number of tokens that depends on the image and is
                    computed from its pixels (`_processing.Counting`); left out otherwise

and, under the registered name, a subclass of vLLM's class of that family with the reducer. To add a family, add a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vlmcompress.engines.vllm.plugin._cpu import look_up_packed, multiply_fp8, unpack_on_load
from vlmcompress.reduction.support import PREFIX, SERVED_FAMILIES

if TYPE_CHECKING:
    from vlmcompress.reduction.choice import ReducerChoice

__all__ = ["SERVED_FAMILIES", "register", "served_reducer"]


def served_reducer(folder: Path) -> ReducerChoice | None:
    """The reducer of a checkpoint's folder as vLLM will read it, without vLLM; None if it carries none.

    Raises UserError for one that the plugin would refuse, its scorer's file included.
    """
    from vlmcompress.engines.vllm.plugin._served_reducer import ServedReducer

    served = ServedReducer.in_folder(folder)
    return served.chosen if served else None


def register() -> None:
    """Register the reduced architectures in vLLM, and replacements for kernels that its CPU build lacks.

    May be called any number of times.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from vlmcompress.engines.vllm.plugin import _fixes
    from vlmcompress.engines.vllm.plugin._loading import Loading, problem

    for family in SERVED_FAMILIES.names():
        original = SERVED_FAMILIES.constant(family, "ARCHITECTURE")
        name, reason = PREFIX + original, problem(family)
        module = "_loading:Unsupported" if reason else f"{family.replace('-', '_')}:{name}"
        # vllm/model_executor/models/registry.py::_ModelRegistry.register_model imports a class named by a string only when it
        # is needed.
        ModelRegistry.register_model(name, f"{__name__}.{module}")
        # vllm/model_executor/models/config.py::MODELS_CONFIG_MAP has no function to register in; an entry is a class with two
        # methods.
        hook = Loading(MODELS_CONFIG_MAP.get(original), reason)
        MODELS_CONFIG_MAP[name] = hook  # type: ignore[assignment]
    _fixes.register()
    multiply_fp8()
    unpack_on_load()
    look_up_packed()
