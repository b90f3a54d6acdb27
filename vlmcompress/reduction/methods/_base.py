"""Reducers' input (`Signals`), their output (`Reduction`), and the exact arithmetic of budgets.

Deciding is separate from applying: a method reads the signals of one image and chooses an output row for each of its `n`
tokens; `Reduction.apply` then applies that to any tensor with a row a token (features, deepstack levels, positions).
Tokens and outputs are in raster order of the grid `(t, h, w)`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

Grid = tuple[int, int, int]
"""Frames, rows and columns of an image's tokens (after any pixel merge of the encoder)."""


@dataclass(frozen=True, eq=False)
class Reduction:
    """The reduction of the `n` tokens of one image to `m` outputs, in raster order.

    target: `[n]` int64, output row of each token, -1 for a dropped one.
    anchor: `[m]` int64, strictly ascending; the token whose position the output keeps, one of its sources.
    weight: `[n]` float32, positive; weight of a token in the mean that its output is.
    scale:  `[m]` float32 or None; outputs are that multiple of their mean (VisionZip's sums), None: the mean itself.
    plain:  whether each output equals its anchor, known without reading tensors; False if unknown.
    """

    target: Tensor
    anchor: Tensor
    weight: Tensor
    scale: Tensor | None = None
    plain: bool = False

    @staticmethod
    def identity(n: int, device: Any = None) -> Reduction:
        """Make the reduction that keeps every token."""
        rows = torch.arange(n, device=device)
        return Reduction(rows, rows, torch.ones(n, device=device), plain=True)

    @staticmethod
    def keep(index: Tensor, n: int) -> Reduction:
        """Keep the tokens `index [m]` (in any order, each once) of `n` and drop the others."""
        anchor = index.sort().values
        rows = torch.arange(len(anchor), device=index.device)
        target = torch.full((n,), -1, dtype=torch.int64, device=index.device).scatter(0, anchor, rows)
        return Reduction(target, anchor, torch.ones(n, device=index.device), plain=True)

    @staticmethod
    def join(parent: Tensor, weight: Tensor | None = None, count: int | None = None) -> Reduction:
        """Merge each token into the token `parent [n]`; one that is its own parent is kept, -1 drops a token.

        `weight [n]` is the weight of tokens in the means; default 1 each. `count`: number of kept tokens, if the
        caller knows it; parents are then not validated, which avoids a device sync.
        """
        n = len(parent)
        kept = parent == torch.arange(n, device=parent.device)
        if count is None:
            if not ((parent < 0) | kept[parent.clamp(min=0)]).all():
                raise ValueError("a token is merged into one that is not kept")
            count = int(kept.sum())
        # Kept tokens in raster order are numbered 0, 1, ...; each other token gets the number of its parent.
        row = kept.cumsum(0) - 1  # output row of each kept token
        target = torch.where(parent < 0, parent, row[parent.clamp(min=0)])
        weight = torch.ones(n, device=parent.device) if weight is None else weight.float()
        return Reduction(target, top(kept, count), weight)

    @staticmethod
    def concat(parts: Sequence[Reduction]) -> Reduction:
        """Join reductions side by side, for a whole prompt: those of its images, and identities for the text between."""
        rows = tokens = 0
        target, anchor = [], []
        for part in parts:
            target.append(torch.where(part.target < 0, part.target, part.target + rows))
            anchor.append(part.anchor + tokens)
            rows, tokens = rows + len(part.anchor), tokens + len(part.target)
        scale = None
        if any(part.scale is not None for part in parts):
            scale = torch.cat([part._scale() for part in parts])
        weight, plain = torch.cat([part.weight for part in parts]), all(part.plain for part in parts)
        return Reduction(torch.cat(target), torch.cat(anchor), weight, scale, plain)

    @functools.cached_property
    def sizes(self) -> Tensor:
        """Number of tokens merged into each output, `[m]` int64."""
        return _accumulate(torch.ones_like(self.target), self.target, len(self.anchor))

    @functools.cached_property
    def totals(self) -> Tensor:
        """Sum of the weights of the tokens merged into each output, `[m]` float32."""
        return _accumulate(self.weight, self.target, len(self.anchor))

    def apply(self, x: Tensor) -> Tensor:
        """Reduce `x [n, ...]` to `[m, ...]` in its dtype, computed in float32 (float64 stays). Unmerged rows keep all bits."""
        if len(x) != len(self.target):
            raise ValueError(f"the reduction is of {len(self.target)} tokens, not of {len(x)}")
        out = x[self.anchor.to(x.device)]
        if self.plain and self.scale is None:
            return out
        sizes = self.sizes.to(x.device)
        # Only rows that are merged or scaled are computed; the others keep their bits.
        merged = sizes > 1 if self.scale is None else (sizes > 1) | (self.scale.to(x.device) != 1)
        if not x.is_floating_point():
            if merged.any():
                raise ValueError("whole numbers have no mean; positions are those of the anchors")
            return out
        # bfloat16 has 8 bits: a sum of a few hundred tokens in it would lose the last ones.
        wide = x.double() if x.dtype == torch.float64 else x.float()
        wide = wide.reshape(len(x), -1)
        total = _accumulate(wide * self.coefficients.to(wide)[:, None], self.target.to(x.device), len(merged))
        return torch.where(merged.view(-1, *[1] * (x.ndim - 1)), total.to(x.dtype).view_as(out), out)

    def expand(self, x: Tensor) -> Tensor:
        """Expand `[m, ...]` to `[n, ...]`: each token gets its output's row. None may be dropped."""
        if (self.target < 0).any():
            raise ValueError("a reduction that drops tokens cannot be undone")
        return x[self.target.to(x.device)]

    @functools.cached_property
    def coefficients(self) -> Tensor:
        """Coefficients `[n]` float32: output row r is the sum of `coefficients_i x_i` over the tokens i whose target is r."""
        safe = self.target.clamp(min=0)
        # [n]: a token's weight over the sum of weights of its output; `safe` gives dropped tokens an index that is then
        # masked.
        factor = self.weight / self.totals[safe]
        factor = factor if self.scale is None else factor * self.scale[safe]
        return factor.masked_fill(self.target < 0, 0.0)

    def then(self, other: Reduction) -> Reduction:
        """Chain this reduction and `other`, which acts on its outputs, into one reduction of the original tokens."""
        if len(other.target) != len(self.anchor):
            raise ValueError(
                f"the second reduction is of {len(other.target)} tokens, the first leaves {len(self.anchor)}"
            )
        safe = self.target.clamp(min=0)
        # A token that was dropped before stays dropped; every other one goes where its output goes.
        target = torch.where(self.target < 0, self.target, other.target[safe])
        inner, outer = self.totals[safe], other.weight[safe]
        weight = self.weight * outer / inner  # multiplied first: sizes stay whole numbers, so means of means stay exact
        if self.scale is None and other.scale is None:
            return Reduction(target, self.anchor[other.anchor], weight, plain=self.plain and other.plain)
        first = self._scale()
        # A scaled output enters the second mean with its scale, so the mean of means is scaled by their weighted mean.
        scale = _accumulate(other.weight * first, other.target, len(other.anchor)) / other.totals
        scale = scale if other.scale is None else scale * other.scale
        return Reduction(target, self.anchor[other.anchor], weight * first[safe], scale)

    def require_valid(self) -> Reduction:
        """Return the reduction itself, or raise ValueError if it is invalid."""
        n, m = len(self.target), len(self.anchor)
        for right, text in (
            (m >= 1, "nothing is kept"),
            (self.weight.shape == self.target.shape == (n,), "target and weight differ in length"),
            (self.scale is None or self.scale.shape == (m,), "scale has another length than anchor"),
            (n >= 1, "there are no tokens"),
        ):
            if not right:
                raise ValueError(f"not a reduction: {text}")
        target, anchor, safe = self.target, self.anchor, self.anchor.clamp(0, n - 1)
        facts = {
            "a target is out of range": (target >= -1) & (target < m),
            "anchors do not ascend": anchor[1:] > anchor[:-1],
            "an anchor is out of range": anchor == safe,
            "weights must be positive": (self.weight > 0) & self.weight.isfinite(),
            "an anchor is not among the sources of its output": target[safe] == torch.arange(m, device=target.device),
        }
        hold = torch.stack([fact.all() for fact in facts.values()]).tolist()  # the only wait for a device
        for right, text in zip(hold, facts, strict=True):
            if not right:
                raise ValueError(f"not a reduction: {text}")
        return self

    def _scale(self) -> Tensor:
        return torch.ones(len(self.anchor), device=self.anchor.device) if self.scale is None else self.scale


@dataclass(frozen=True, eq=False)
class Signals:
    """Signals of one image that a method may read; tensors `[n, ...]` have a row for each token (see `merged`).

    grid:       `(t, h, w)`, with `t * h * w` tokens in raster order.
    features:   `[n, d]`, the tokens themselves at the method's stage.
    keys:       `[n, dk]`, attention keys of the tokens, `heads` heads concatenated; before RoPE in the encoder, after
                it in the language model, as in the published code.
    saliency:   `[n]`, attention that a token receives, mean over heads: from CLS or all tokens (encoder), from the
                last token (language model).
    windowed:   `[n]`, saliency in a shallow layer of the encoder (VScan's local scan).
    pixels:     `[n, values]`, the colour values of what each token shows, 1 between black and white.
    query:      `[q, d]`, the text's tokens at the same stage; `query_keys`: `[q, dk]`, their keys.
    merged:     the reduction of the grid's tokens by earlier layers; rows are then its outputs.
    finite:     at construction: the caller guarantees that there is no NaN or Inf, which saves the check's device
                sync.
    """

    grid: Grid
    features: Tensor | None = None
    keys: Tensor | None = None
    heads: int | None = None
    saliency: Tensor | None = None
    windowed: Tensor | None = None
    pixels: Tensor | None = None
    query: Tensor | None = None
    query_keys: Tensor | None = None
    merged: Reduction | None = None
    finite: dataclasses.InitVar[bool] = False

    def __post_init__(self, finite: bool) -> None:
        if len(self.grid) != 3 or any(type(side) is not int or side < 1 for side in self.grid):
            raise ValueError(f"the grid must be three positive whole numbers, got {self.grid!r}")
        if self.merged is not None and len(self.merged.target) != math.prod(self.grid):
            raise ValueError(f"{len(self.merged.target)} tokens were merged on a grid of {math.prod(self.grid)}")
        for name in ("features", "keys", "saliency", "windowed", "pixels"):
            value = getattr(self, name)
            if value is not None and len(value) != self.n:
                raise ValueError(f"{name} has {len(value)} rows for {self.n} tokens")
        if self.keys is not None and self.heads is not None and self.keys.shape[1] % self.heads:
            raise ValueError(f"keys of width {self.keys.shape[1]} do not divide into {self.heads} heads")
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        floats = {name: x for name, x in values.items() if isinstance(x, Tensor) and x.is_floating_point()}
        if floats and not finite:
            # All checks in one tensor, so that the host waits for the device once and not for each signal.
            hold = torch.stack([x.isfinite().all().to(self.device) for x in floats.values()]).tolist()  # one wait
            for right, name in zip(hold, floats, strict=True):
                if not right:
                    raise ValueError(f"{name} holds NaN or Inf")

    @property
    def n(self) -> int:
        """Number of rows: the grid's tokens, or those left after earlier merges."""
        return math.prod(self.grid) if self.merged is None else len(self.merged.anchor)

    @property
    def device(self) -> torch.device:
        """The device that the signals are on."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))


@dataclass(frozen=True)
class Reducer:
    """A method with its options: the contract of a file of this folder, which ends in `REDUCER = NAME()`.

    A subclass is a frozen dataclass. Its fields are the options of a recipe, each with a default, checked when it is
    constructed (ValueError). A field or property named like a member here overrides it. Class attributes are literals, which
    the package reads from the file without importing it:

        STAGE: where its signals come from: "encoder" (in or right after it, before the projector), "projected" (the rows
            that the language model would get), "llm" (within the language model).
        NEEDS: required fields of `Signals`.
        MEDIA: "video" for a method that keeps images whole.
        COUNT: "fixed": all images of one size keep the same number of tokens; "adaptive": it depends on the image.
        MERGES: whether it merges tokens in each of the encoder's layers, by `merge_layer`; else `reduce` does all at once.
        LEARNS: whether it has the option `thresholds`, which is learned from images.
        SERVED: whether an engine that fixes one token count for all layers before encoding can serve it; WHY_NOT: the
            reason, if it can't.
        BATCHED: whether `reduce` is many small steps, which `reduce_all` runs for all images of a call at once by
            `torch.vmap`. Then no tensor that all images share is changed in place, and a loop over the kept tokens goes
            through `_selecting.for_all_images`.
        NO_BETTER_THAN: the baseline that it did not beat on any demo model at half the tokens (docs/results.md); None for
            methods that did, or that were not measured. `list reducers` shows it.
    """

    STAGE: ClassVar[Literal["encoder", "projected", "llm"]] = "projected"
    NEEDS: ClassVar[frozenset[str]] = frozenset()
    MEDIA: ClassVar[Literal["image", "video"]] = "image"
    COUNT: ClassVar[Literal["fixed", "adaptive"]] = "fixed"
    MERGES: ClassVar[bool] = False
    LEARNS: ClassVar[bool] = False
    SERVED: ClassVar[bool] = True
    WHY_NOT: ClassVar[str | None] = None
    BATCHED: ClassVar[bool] = False
    NO_BETTER_THAN: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        """Check the options that several methods have."""
        names = {option.name for option in dataclasses.fields(self)}
        if "keep" in names:
            require_keep(self.keep)
        if self.keep_max is not None:
            require_number("keep_max", self.keep_max, self.keep or 0, 1)
        if "layer" in names:
            require_whole("layer", self.layer, least=1)
        if "shallow" in names:
            require_whole("shallow", self.shallow)

    def reduce(self, signals: Signals) -> Reduction:
        """Reduce the tokens of one image; call it by `methods.reduce`, which checks."""
        raise NotImplementedError

    def merge_layer(self, signals: Signals, layer: int, layers: int, count: int | None = None) -> Reduction:
        """Merge rows in one of the encoder's `layers`; call it by `methods.merge_layer`, which checks.

        Args:
            signals: of the rows that are left; `signals.merged` is the reduction by earlier layers.
            count: the tokens that are left after the last layer; None: as the method decides.
        """
        raise NotImplementedError

    @property
    def keep(self) -> float | None:
        """Share of tokens to keep; None for methods without a share."""
        return None

    @property
    def keep_max(self) -> float | None:
        """The largest `keep` that a request to a server may set; None: it may set none."""
        return None

    def budget(self, grid: Grid) -> Any:
        """Exactly how many tokens an image keeps, an int: the share `keep`. None where that depends on what it shows.

        Where that share is less than one token all stay, but one where requests set it, which may divide a number among tiles.
        """
        if self.keep is None:
            return None
        return share(grid, self.keep) if self.keep_max is None else max(rounded(grid, self.keep), 1)

    @property
    def layer(self) -> int | None:
        """Index of the decoder block before which tokens are dropped; None for methods outside the language model."""
        return None

    @property
    def shallow(self) -> int | None:
        """Index of the encoder block whose attention is `Signals.windowed`; None if unused."""
        return None

    @property
    def by_channel(self) -> bool:
        """Whether the choice depends on single channels, so that rotating the projected rows changes it."""
        return False

    @property
    def thresholds(self) -> tuple[float, ...] | str | None:
        """One threshold per merging layer, or their file; None: not learned yet, or nothing to learn."""
        return None

    @property
    def has_thresholds(self) -> bool:
        """Whether the thresholds themselves are set."""
        return isinstance(self.thresholds, tuple)

    @property
    def needs_thresholds(self) -> bool:
        """Whether thresholds are needed and neither set nor in a file."""
        return self.LEARNS and self.thresholds is None

    def with_thresholds(self, thresholds: tuple[float, ...] | None) -> Self:
        """The options with these thresholds; unchanged where the method learns none."""
        return self

    @property
    def scorer(self) -> str | None:
        """The file of the method's trained network, "" if not set; None: the method has no network."""
        return None

    @property
    def network(self) -> Any:
        """The loaded network; not a setting, so it is in no recipe or checkpoint."""
        return None

    def settings(self) -> dict[str, Any]:
        """The options by name, as in recipes and checkpoints."""
        return {
            option.name: getattr(self, option.name) for option in dataclasses.fields(self) if option.name != "network"
        }


@dataclass(frozen=True)
class ShareReducer(Reducer):
    """A method that works for any share of an image's tokens, so that each request may set its own."""

    keep_max: float | None = dataclasses.field(default=None, kw_only=True)


LEAST_SHARE = 1e-6
"""The smallest `keep`; less is no token of any image below half a million tokens."""
MOST = 10**6
"""The largest whole number of an option; no image has more tokens, no model more layers."""


def require_keep(keep: Any) -> None:
    """Raise ValueError unless `keep` is a number from `LEAST_SHARE` to 1."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"keep must be a number above 0 and at most 1, got {reprlib.repr(keep)}")
    if keep < LEAST_SHARE:
        raise ValueError(f"keep must be at least {LEAST_SHARE:g}, got {keep!r}, which leaves no token of any image")


def require_whole(name: str, value: Any, least: int = 0, most: int = MOST) -> None:
    """Raise ValueError unless `value` is a whole number from `least` to `most`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {reprlib.repr(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {reprlib.repr(value)}")


def require_number(name: str, value: Any, least: float, most: float) -> None:
    """Raise ValueError unless `value` is a number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {reprlib.repr(value)}")


def rounded(grid: Grid, keep: float) -> int:
    """Number of tokens in a share `keep` of the grid, rounded half up, which may be none."""
    return math.floor(keep * math.prod(grid) + 0.5)


def share(grid: Grid, keep: float) -> int:
    """Number of tokens in a share `keep` of the grid, rounded half up; all, when that would be none."""
    return rounded(grid, keep) or math.prod(grid)


def top(scores: Tensor, k: int) -> Tensor:
    """Indices `[k]` of the highest scores, best first; among equals the lower index comes first, on every device."""
    return scores.sort(descending=True, stable=True).indices[:k]


def unit(x: Tensor) -> Tensor:
    """Scale the rows of `x [n, d]` to length 1, float32; zero rows stay zero. The largest entry is divided out first.

    So tiny and huge rows are exact too, and a scale of 2^k changes no bit.
    """
    x = x.float()
    # Squares overflow from 2^64 on and vanish below 2^-75 in float32; this division prevents both.
    x = x / x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def _accumulate(values: Tensor, target: Tensor, m: int) -> Tensor:
    """Sum rows by target, `[n, ...]` to `[m, ...]`, in the order of the tokens; rows of target -1 are left out.

    The result has the same bits in every call, with any number of threads.
    """
    out = torch.zeros(m + 1, *values.shape[1:], dtype=values.dtype, device=values.device)
    # An extra row collects dropped tokens, so that no index has to be filtered.
    rows = target % (m + 1)  # -1 becomes the row after the last
    if values.is_cuda and values.is_floating_point():
        # index_put_ sorts the rows first, in a dozen kernels; index_add_ would add in whatever order its threads run.
        return out.index_put_((rows,), values, accumulate=True)[:m]
    return out.index_add_(0, rows, values)[:m]  # on CPUs index_put_ has no fixed order; whole numbers need none
