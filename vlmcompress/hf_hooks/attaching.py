"""Attach a reducer to a model, with the kind of attachment that its method needs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vlmcompress.hf_hooks import scorer_file, threshold_file
from vlmcompress.hf_hooks._attach import Attachment
from vlmcompress.hf_hooks._early import Early
from vlmcompress.hf_hooks._generating import Generating
from vlmcompress.hf_hooks._inside import Inside
from vlmcompress.hf_hooks._merging import Merging
from vlmcompress.hf_hooks._views import Views
from vlmcompress.hf_hooks.block_mask import Blocks
from vlmcompress.hf_hooks.pixels import Pixels
from vlmcompress.hf_hooks.support import check, check_counter
from vlmcompress.models import VLM
from vlmcompress.recipe.reducer import ReducerChoice, choose
from vlmcompress.reducers import REGISTRY, TokenCounter


def attach(
    vlm: VLM, method: str | ReducerChoice, options: Any = None, counter: TokenCounter | None = None
) -> Attachment:
    """Reduce the visual tokens of `vlm` from now on.

    Args:
        vlm: the model; one reducer at a time (ValueError).
        method: name of a reducer, or one with its options (`vlmcompress.recipe.reducer`).
        options: its `Options`, or a mapping of them; default: its defaults.
        counter: computes how many tokens each image keeps, instead of the method (`dymu`), as engines that serve it need.

    Raises UserError when this model and this method do not go together (see `refusal`) or an option is wrong. An image
    whose kept share rounds to no token is kept whole, with one warning (`KeptWhole`) for all such images.
    """
    if isinstance(method, str):
        ready = isinstance(options, REGISTRY.get(method).Options)
        method = ReducerChoice(method, options) if ready else choose(method, options or {}, "reduce")
    check(vlm, method.method, method.options)
    method = threshold_file.known(vlm, scorer_file.known(vlm.model.config, method))
    kind = _kind(method.module)
    if counter is None:
        return kind(vlm, method.module, method.options)
    check_counter(vlm.spec, vlm.model.config, method, counter)
    assert issubclass(kind, Early)
    return kind(vlm, method.module, method.options, counter)


def _kind(module: ModuleType) -> type[Attachment]:
    """The class of attachment that applies a method."""
    if hasattr(module, "merge"):
        return Merging
    if hasattr(module, "mask"):
        return Blocks
    if module.STAGE == "llm":
        return Inside if module.COUNT == "fixed" else Generating
    if module.STAGE == "pixels":
        return Pixels if "pixels" in module.NEEDS else Views
    return Early
