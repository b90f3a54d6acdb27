"""vlmcompress: quantize a vision-language model into a checkpoint that a real engine serves, and measure what it cost.

From Python, `vlmcompress.api` (see docs/python.md):

    import vlmcompress

    recipe = vlmcompress.Recipe.of("MODEL", "OUT", scheme="awq", calibrate={"data": "images"})
    vlmcompress.quantize(recipe)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmcompress.api import Recipe, Result, Results, UserError, attach, evaluate, load, quantize

__version__ = "0.1.0"

__all__ = ["Recipe", "Result", "Results", "UserError", "attach", "evaluate", "load", "quantize"]


def __getattr__(name: str) -> Any:
    """A name of `vlmcompress.api`; that module, which imports torch and transformers, is imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'vlmcompress' has no attribute '{name}'")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in `vlmcompress.cli`
    return getattr(importlib.import_module("vlmcompress.api"), name)


def __dir__() -> list[str]:
    """The names of the package, with those that are imported on first use."""
    return sorted({*globals(), *__all__})
