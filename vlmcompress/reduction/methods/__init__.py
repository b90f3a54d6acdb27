"""Visual-token reducers, one method per file, named as in a recipe's `reduce.method`.

A reducer is pure: it maps the signals of one image to a `Reduction`, and knows neither the model nor other images. A
module of this folder has

    STAGE       where its signals come from: "pixels" (before the encoder), "encoder" (in or right after it, before the
                projector), "projected" (the rows that the language model would get), "llm" (within the language model)
    NEEDS       required fields of `Signals`
    OPTIONAL    fields of `Signals` that are used when present; left out if there are none
    MEDIA       "video" for a method that keeps images whole; left out by all others
    COUNT       "fixed": all images of one size keep the same number of tokens; "adaptive": it depends on the image
    SERVED      whether an engine that fixes one token count for all layers before encoding can serve it
    WHY_NOT     the reason, if SERVED is False
    BATCHED     True: `reduce` is many small steps, which `reduce_all` runs for all images of a call at once by
                `torch.vmap`. Then no tensor that all images share is changed in place, and a loop over the kept tokens
                goes through `_selecting.for_all_images`. Left out by methods of few steps
    NO_BETTER_THAN  the baseline that it did not beat on any demo model at half the tokens (docs/results.md); left
                out by methods that did, or that were not measured. `list reducers` shows it
    Options     frozen dataclass that extends `ReducerOptions`: the recipe's options, checked when made (ValueError).
                The package reads the share, the layer and what is learned through that base, whose members a field or
                property of the same name overrides. Every field has a default. Its `budget(grid)` is exactly how many
                tokens an image keeps: by default the share `keep`, None when COUNT is adaptive

and one of

    reduce(signals, options) -> Reduction                   at once; `options.layer` or `.drops` say where, for stage "llm"
    merge(signals, options, layer, layers, count) -> Reduction
                                    a bit in each of the encoder's `layers`; `signals.merged` is the reduction by
                                    earlier layers, `count` the tokens left after the last layer (None: as `options`
                                    say)

A method that drops tokens at several decoder blocks lists them in `Options.drops`; `reduce` gets the
options of one drop, and `signals.merged` is the reduction so far (see `pyramiddrop`). One that only restricts
attention has an identity `reduce` and a `mask` (see `pevlm`). `reduce`, `reduce_all` and `merge` below check and run
them. Every method is deterministic (equal scores go to the lower index), computes in float32 whatever the dtype, keeps
raster order, and returns all tokens untouched for `keep: 1`; the same input gives the same bits in every call. One
that is SERVED does not wait for its signals' device: no shape and no branch depends on a value, once it is given a
count. An image whose share `keep` rounds to no token keeps all (of a video, `evs` keeps the first frame at
least). To add a reducer, add a file.
"""

# ruff: noqa: F401  # what is imported here is what the package offers

from __future__ import annotations

from vlmcompress.reduction.methods._base import Grid, ReducerOptions, Reduction, Signals
from vlmcompress.reduction.methods._counter import TokenCounter, fit_counter, read_counter
from vlmcompress.reduction.methods._layerwise import Merger
from vlmcompress.reduction.methods._run import merge, missing, reduce, reduce_all, too_small
from vlmcompress.utils.registry import REDUCERS as REGISTRY
