"""Attachments of all stages: hooks on the model, the call in progress, and the tokens left out of each cache."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.models import VLM
from vlmcompress.reduction import methods
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks.units import Call, Reduced, Slots, Unit, join_reductions, units
from vlmcompress.reduction.methods import Reduction, Signals
from vlmcompress.utils.errors import UserError

_ATTACHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class KeptWhole(UserWarning):
    """Warning that an image is kept whole, as the kept share of its tokens would round to none."""


class Attachment:
    """A reducer attached to a model. Use it as a context manager, or call `detach`.

    reduced_units: the units of the latest call with images, with their reductions.
    """

    def __repr__(self) -> str:
        return f"<{self.chosen} attached to {type(self.vlm.model).__name__}>"

    def __init__(self, vlm: VLM, chosen: ReducerChoice):
        if vlm.model in _ATTACHED:
            raise ValueError("the model has a reducer attached already; detach it first")
        self.vlm, self.chosen, self.reducer = vlm, chosen, chosen.reducer
        self._keep: float | None = None  # what `set_keep` set
        self._warned = False  # whether `KeptWhole` was issued
        self.reduced_units: list[Reduced] = []
        self._call: Call | None = None
        self._new: Slots | None = None  # slots of the cache, once this call is done
        self._caches: weakref.WeakKeyDictionary[Any, Slots] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []
        self.text: nn.Module = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
        # `model.model` in transformers: what `generate` and `forward` both call with pixels and ids.
        base = vlm.model.get_submodule(vlm.spec.layers.split(".")[0])
        _ATTACHED.add(vlm.model)
        self._keep_pixels()
        try:
            # Hooks of every stage: on the whole model, on the module with encoder and decoder, and on the decoder.
            self._before(vlm.model, self._no_labels)
            self._before(base, self._begin)
            self._before(self.text, self._enter)
            self._after(self.text, self._leave)
            self._after(base, self._end)
            self._hook()
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Remove all hooks. The model is as it was; caches filled with the reducer on cannot be continued."""
        while self._undo:
            self._undo.pop()()
        _ATTACHED.discard(self.vlm.model)

    def set_keep(self, keep: Any) -> None:
        """Set the share, or the number, of its tokens that each image keeps from now on; None: the reducer's own share.

        Raises ValueError for what the reducer's `keep_max` does not allow, and for a number where images are cut into tiles.
        """
        checked = None if keep is None else self.chosen.requested(keep)
        if checked is not None and checked > 1 and self.vlm.spec.images.grid == "tiles":
            raise ValueError(f"{self.vlm.spec.family} cuts images into tiles; set 'keep' to a share here")
        self._keep = checked

    def images(self) -> list[Reduction]:
        """The reduction of each image of the latest call, on the CPU; newlines are among its tokens, and kept.

        For families that cut images into tiles (`Images.grid` "tiles") there is one for each tile.
        """
        grouped: dict[int, list[Reduced]] = {}
        for unit in self.reduced_units:
            grouped.setdefault(unit.image, []).append(unit)
        return [join_reductions(units) for units in grouped.values()]

    @property
    def stages(self) -> list[tuple[int, list[Reduced]]]:
        """Pairs (decoder block, units of the latest call with images from that block on); unreduced before the block."""
        return [(0, self.reduced_units)]

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _hook(self) -> None:
        """Set the further hooks of a stage."""

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        """Reduce the language model's arguments. `past`: slots of the cache; None if no token was dropped from it."""
        raise NotImplementedError

    def _keep_pixels(self) -> None:
        """Make `generate` pass pixels to the model. From transformers 5.18 on it encodes them first, bypassing all hooks, and
        no longer repeats the patches of Qwen's images for beams."""
        model: Any = self.vlm.model
        if not hasattr(model, "_supports_mm_encoder_outputs"):
            return
        expand, patches = model._expand_inputs_for_generation, self.vlm.spec.images.grid == "thw"

        def expanded(expand_size: int = 1, **kwargs: Any) -> Any:
            if expand_size > 1 and patches:
                raise UserError(
                    "beam search does not go with a reducer here; take transformers before 5.18, or one beam"
                )
            return expand(expand_size=expand_size, **kwargs)

        model._supports_mm_encoder_outputs = lambda: False
        model._expand_inputs_for_generation = expanded
        for name in ("_supports_mm_encoder_outputs", "_expand_inputs_for_generation"):
            self._undo.append(lambda name=name: delattr(model, name))  # type: ignore[misc]

    def _before(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._undo.append(module.register_forward_hook(hook, with_kwargs=True, always_call=True).remove)

    def _no_labels(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None and kwargs.get("pixel_values") is not None:
            raise UserError("labels do not fit a reduced prompt; take the loss of the answer's tokens from the logits")

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Hook before the model runs; returns its arguments where they change."""
        call = Call.of(module, args, kwargs)
        if call.get("pixel_values_videos") is not None:
            raise UserError("visual tokens of videos are not reduced yet; give images, or detach the reducer")
        if call.get("mm_encoder_outputs"):
            raise UserError("images that are encoded already are not reduced; give pixel_values, or detach the reducer")
        self._call = call
        return None

    def _end(self, *_: object) -> None:
        self._call = None

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Hook before the language model runs; returns its reduced arguments."""
        self._new = None
        if self._call is None:
            return None
        cache = kwargs.get("past_key_values")
        slots = cache.get_seq_length() if cache is not None else 0
        # A cache object may be reused for another prompt; the stored slots then belong to the previous one.
        if cache is not None and not slots:
            self._caches.pop(cache, None)  # emptied, and filled anew
        past = self._caches.get(cache) if slots else None
        units = self._units()
        if not units and past is None:
            return None
        self._require_window(slots + kwargs["inputs_embeds"].shape[1])
        mask = self._call.get("attention_mask")  # the model may derive one per kind of block
        if getattr(cache, "is_compileable", False) or (mask is not None and getattr(mask, "ndim", 0) != 2):
            raise UserError("a static cache or a mask of one's own does not go with a reducer; use the default cache")
        inputs = kwargs | {"attention_mask": mask}
        reduced = self._reduce(inputs, units, past)
        return args, kwargs if reduced is inputs else reduced

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Hook after the language model: store which tokens are missing from its cache."""
        # The model may have created the cache itself, so the object is known only from its output.
        cache = getattr(output, "past_key_values", None)
        if cache is not None and self._new is not None:
            self._caches[cache] = self._new
        self._new = None

    def _require_window(self, slots: int) -> None:
        """Refuse prompts longer than a sliding window: it counts slots, so dropping tokens would widen it."""
        config: Any = self.text.config
        window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        # transformers' `layer_types` says which blocks slide; without it `sliding_window` holds for all.
        slides = kinds is None or "sliding_attention" in kinds
        if slides and isinstance(window, int) and slots > window:
            raise UserError(
                f"{slots} tokens exceed the attention window of {window}, which dropped tokens widen; shorten them"
            )

    def _units(self) -> list[Unit]:
        assert self._call is not None
        return units(self.vlm, self._call)

    def _decide(self, units: Sequence[Unit], signals: Sequence[Signals]) -> list[Reduction]:
        """Decide the reduction of each unit's rows, and add the units with their reductions to `reduced_units`."""
        for unit in units:
            if not self._warned and methods.too_small(self.reducer, unit.grid):
                self._warned = True
                grid = f"a {unit.grid[1]}x{unit.grid[2]} grid"
                text = f"keep={self.reducer.keep:g}: the share is less than one token of {grid}; such images are kept whole"
                warnings.warn(text, KeptWhole, stacklevel=2)
        pairs = zip(map(self._reducer_of, units), signals, strict=True)
        results = list(methods.grouped(pairs, methods.reduce_all))
        self.reduced_units += [unit.reduced(result) for unit, result in zip(units, results, strict=True)]
        return results

    def _reducer_of(self, unit: Unit) -> methods.Reducer:
        """The reducer with what `set_keep` set for a unit of an image."""
        return self.reducer if self._keep is None else self.chosen.keeping(self._keep, unit.span[1]).reducer

    def _remaining(
        self, reduced: Sequence[Reduced], real: Tensor, held: Slots, before: int
    ) -> tuple[Slots, Slots] | None:
        """The remaining tokens of this call, and those of the whole sequence; None if none are dropped now or were before.

        Args:
            reduced: the units of this call; their anchors and the text stay, their other tokens go.
            real: `[b, s]` bool, this call's tokens that are no padding.
            held: the slots of the cache; all of the columns after them, up to `before`, are kept.
        """
        keep = torch.ones_like(real)
        for unit in reduced:
            keep[unit.row, unit.columns] = False
            keep[unit.row, unit.columns[unit.reduction.anchor]] = True
        dropped = not keep.all()
        if not dropped and self._new is None:
            return None
        new = Slots.of(keep, real) if dropped else Slots.identity(real.shape[0], real.shape[1], real.device)
        layout = held.then(before - held.length, new)
        if dropped:
            self._new = layout
        return new, layout


def merged_rows(x: Tensor, reduced: Sequence[Reduced]) -> Tensor:
    """A copy of `x [b, s, ...]` with the merged rows of units at their anchors."""
    out = x.clone()
    for unit in reduced:
        out[unit.row, unit.columns[unit.reduction.anchor]] = unit.reduction.apply(x[unit.row, unit.columns])
    return out


def full_mask(kwargs: dict[str, Any], before: int) -> Tensor:
    """The mask of the whole sequence, `[b, before + s]`; ones where none is given."""
    embeds = kwargs["inputs_embeds"]
    shape = (embeds.shape[0], before + embeds.shape[1])
    mask = kwargs.get("attention_mask")
    if mask is None:
        return torch.ones(shape, dtype=torch.long, device=embeds.device)
    if tuple(mask.shape) != shape:
        raise UserError(
            f"the attention mask covers {mask.shape[1]} tokens, cache and prompt {shape[1]}; pass that of the full sequence"
        )
    return mask
