"""Visual-token reducers, one method per file, named as in a recipe's `reduce.method`.

A reducer is pure: it maps the signals of one image to a `Reduction`, and knows neither the model nor other images. Each module
defines a subclass of `Reducer` (see there for the contract) and its instance with default options:

    REDUCER     what the recipe's name stands for

`reduce`, `reduce_all` and `merge_layer` below check and run it. Every method is deterministic (equal scores go to the lower
index), computes in float32 whatever the dtype, keeps raster order, and returns all tokens untouched for `keep: 1`; the same
input gives the same bits in every call. One that is SERVED does not wait for its signals' device: no shape and no branch
depends on a value, once it is given a count. An image whose share `keep` rounds to no token keeps all (of a video, `evs` keeps
the first frame at least). To add a reducer, add a file.
"""

# ruff: noqa: F401  # what is imported here is what the package offers

from __future__ import annotations

from vlmcompress.reduction.methods._base import LEAST_SHARE, MOST, Grid, Reducer, Reduction, Signals, share
from vlmcompress.reduction.methods._counter import TokenCounter, fit_counter, read_counter
from vlmcompress.reduction.methods._layerwise import Merger
from vlmcompress.reduction.methods._run import grouped, merge_layer, missing, reduce, reduce_all, too_small
from vlmcompress.utils.registry import REDUCERS as REGISTRY
