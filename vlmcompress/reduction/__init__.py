"""Attach visual-token reducers to transformers models.

    with attach(vlm, "dart", {"keep": 0.25}) as attached:
        vlm.model.generate(**inputs)
    attached.images()    # what became of the tokens of each image

`vlmcompress.reducers` decides, this package applies, by hooks: whatever calls the model (`forward`, `generate`) gets the
reduced one until `detach`. The language model really gets fewer rows. Tokens that are kept stay where they were: positions
(1-D and M-RoPE), text behind an image, and every generated token have the position that they have without a reducer.
Reducing to a selection is therefore the same as hiding the dropped tokens from attention, and is tested to be. Two things
are not attention: Qwen towers never get the patches that `pixelprune` drops, so the others do not see them either, and
LFM2's short convolutions take the tokens that are left for neighbours. In Gemma 3 what is left of an image sees what is left
of it in both directions.

Logits and hidden states have the reduced length. A batch is padded on the left, on the right if it was. Each image, or tile
where a family cuts images into tiles, is reduced on its own; videos are not. The caches hold what is kept, and a model
continues them only while the reducer that filled them is attached. Methods that look at the text see all of the prompt's
words: a prompt that holds an answer (teacher forcing, or generation without a cache) shows them the answer too.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vlmcompress.models import VLM
from vlmcompress.recipe.reducer import Chosen, choose
from vlmcompress.reducers import REGISTRY
from vlmcompress.reducers._counter import Counter
from vlmcompress.reduction import learning as thresholds
from vlmcompress.reduction._attach import Attachment, KeptWhole
from vlmcompress.reduction._blocks import Blocks
from vlmcompress.reduction._early import Early
from vlmcompress.reduction._generating import Generating
from vlmcompress.reduction._inside import Inside
from vlmcompress.reduction._merging import Merging
from vlmcompress.reduction._views import Views
from vlmcompress.reduction.carrying import attach_carried
from vlmcompress.reduction.pixels import Pixels
from vlmcompress.reduction.support import check, check_counter, refusal
from vlmcompress.reduction.units import Reduced

__all__ = ["Attachment", "Chosen", "KeptWhole", "Reduced", "attach", "attach_carried", "refusal"]


def attach(vlm: VLM, method: str | Chosen, options: Any = None, counter: Counter | None = None) -> Attachment:
    """Reduce the visual tokens of `vlm` from now on.

    Args:
        vlm: the model; one reducer at a time (ValueError).
        method: name of a reducer, or one with its options (`vlmcompress.recipe.reducer`).
        options: its `Options`, or a mapping of them; default: its defaults.
        counter: says how many tokens each image keeps, instead of the method (`dymu`), as engines that serve it need.

    UserError when this model and this method do not go together (see `refusal`) or an option is wrong. An image of which
    the share is no token is kept whole, with one warning (`KeptWhole`) for all such images.
    """
    if isinstance(method, str):
        ready = isinstance(options, REGISTRY.get(method).Options)
        method = Chosen(method, options) if ready else choose(method, options or {}, "reduce")
    check(vlm, method.method, method.options)
    method = thresholds.known(vlm, method)
    if counter:
        check_counter(vlm.model.config, method, counter)
        return Merging(vlm, method.module, method.options, counter)
    return _kind(method.module)(vlm, method.module, method.options)


def _kind(module: ModuleType) -> type[Attachment]:
    """How a method is applied."""
    if hasattr(module, "merge"):
        return Merging
    if hasattr(module, "mask"):
        return Blocks
    if module.STAGE == "llm":
        return Inside if module.COUNT == "fixed" else Generating
    if module.STAGE == "pixels":
        return Pixels if "pixels" in module.NEEDS else Views
    return Early
