"""Visual-token reducers, one method a file; the file's name is `reduce.method` of a recipe.

A reducer is pure: it takes the signals of one image and returns what becomes of each of its tokens, a `Reduction`. It knows
no model and no other image. A module of this folder has

    STAGE       where its signals come from: "pixels" (before the encoder), "encoder" (in or right after it, before the
                projector), "projected" (the rows that the language model would get), "llm" (within the language model)
    NEEDS       fields of `Signals` that it cannot do without; OPTIONAL, where there are any: fields used when they are given
    COUNT       "fixed": all images of one size keep the same number of tokens; "adaptive": it depends on the image
    SERVED      whether an engine with one token count for all layers, fixed before the encoder runs, can serve it;
                WHY_NOT says why when it cannot
    BATCHED     whether `reduce` is many small steps, which `reduce_all` takes for all images of a call at once by `torch.vmap`:
                no tensor that is alike for all images is changed in place, and a loop over the tokens that are kept goes
                through `_selecting.for_all_images`. Left out by methods of few steps
    NO_BETTER_THAN  the baseline that it did not beat on any demo model at half the tokens (docs/results.md); left
                out by methods that did, or that were not measured. `list reducers` shows it
    Options     frozen dataclass that extends `ReducerOptions`: the recipe's options, checked when made (ValueError). What the
                package asks of options (the share, the layer, whether there is something to learn) it asks of that base: a
                field or property of the same name answers instead. Every field has a default
    budget(grid, options) -> int | None     exactly how many tokens an image keeps; None when COUNT is adaptive

and one of

    reduce(signals, options) -> Reduction                   at once; `options.layer` or `.drops` say where, for stage "llm"
    merge(signals, options, layer, layers, count) -> Reduction
                                    a bit in each of the encoder's `layers`; `signals.merged` is what the layers before made
                                    of the grid, `count` how many tokens are left behind the last (None: as `options` say)

A method within the language model that drops tokens at several blocks says so by `Options.drops`; its `budget` and `reduce`
get the options of one drop, and `signals.merged` is what the drops before have left (see `pyramiddrop`). One that restricts
attention and keeps all tokens has, besides a `reduce` that is the identity, a `mask` (see `pevlm`).
`reduce`, `reduce_all` and `merge` below check and run them. Every method is deterministic (equal scores go to the lower
index), computes in float32 whatever the dtype, keeps raster order, and returns all tokens untouched for `keep: 1`; the same
input gives the same bits in every call. One that is SERVED does not wait for its signals' device: no shape and no branch
depends on a value, once it is given a count. An image is kept
whole where the share `keep` of it rounds to no token. To add a reducer, add a file.
"""

from __future__ import annotations

from vlmcompress.reduction.methods._base import Grid, ReducerOptions, Reduction, Signals
from vlmcompress.reduction.methods._counter import TokenCounter, fit_counter, read_counter
from vlmcompress.reduction.methods._layerwise import Merger
from vlmcompress.reduction.methods._run import merge, missing, reduce, reduce_all, too_small
from vlmcompress.utils.registry import REDUCERS as REGISTRY

__all__ = [
    "REGISTRY",
    "Grid",
    "Merger",
    "ReducerOptions",
    "Reduction",
    "Signals",
    "TokenCounter",
    "fit_counter",
    "merge",
    "missing",
    "read_counter",
    "reduce",
    "reduce_all",
    "too_small",
]
