"""Apply reducers that merge within the encoder: each layer processes the rows left by the layer before.

Rows are merged between a layer's attention and its MLP; keys of later layers are weighted by their size (its log is added to
their logits). After the projector merged rows are expanded to all their patches, so that the model's own code places them in
the prompt. Of each merged row the language model then gets one copy, at its anchor, the patch that it was merged into. If a
token is a block of patches, rows are expanded right after the last layer, as pixel shuffle and pooling need the whole grid;
later layers treat each token separately, so equal ones stay equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vlmcompress.models import VLM, block_side, patch_side
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks.early import Early
from vlmcompress.reduction.hooks.pixels import pictures
from vlmcompress.reduction.hooks.tap import join_heads, tap
from vlmcompress.reduction.methods import Merger, Reducer, TokenCounter
from vlmcompress.reduction.support import feature_layers, strategy
from vlmcompress.utils.errors import UserError

M = TypeVar("M", bound=Merger)


class EncoderHooks:
    """Hooks on the encoder's layers up to the one whose output is used.

    Args:
        start: function that returns the merger for a run of the encoder, given the first layer's input `states [images, rows,
            d]`; or None to merge nothing.
    """

    def __init__(self, vlm: VLM, start: Callable[[Tensor], Merger | None]):
        self._start = start
        self.merger: Merger | None = None  # merger of the latest run
        self._undo: list[Callable[[], None]] = []
        every: Any = vlm.model.get_submodule(vlm.spec.vision_layers)
        assert vlm.spec.tower.joint is not None
        attention, norm = vlm.spec.tower.joint
        # The bias for sizes is a float mask `[b, 1, 1, keys]`, which transformers' sdpa kernel adds to the logits; flash
        # attention does not support it.
        kernel = every[0].get_submodule(attention).config._attn_implementation
        if kernel != "sdpa":
            raise UserError(f"attention '{kernel}' takes no sizes; load the model with attn_implementation='sdpa'")
        layers = every[: feature_layers(vlm.model.config)]
        self._undo.append(layers[0].register_forward_pre_hook(self._begin).remove)
        for number, layer in enumerate(layers):
            part = layer.get_submodule(attention)
            self._undo.append(tap(part, self._listen))
            self._undo.append(part.register_forward_pre_hook(self._attend, with_kwargs=True).remove)
            join = functools.partial(self._join, number)
            self._undo.append(layer.get_submodule(norm).register_forward_pre_hook(join).remove)
        if vlm.spec.tower.units == "block":
            self._undo.append(layers[-1].register_forward_hook(self._spread).remove)

    def remove(self) -> None:
        """Remove the hooks."""
        while self._undo:
            self._undo.pop()()

    def _begin(self, module: nn.Module, args: tuple) -> None:
        """Hook before the first layer."""
        self.merger = self._start(args[0])
        self._dtype = args[0].dtype

    def _attend(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        """Hook before a layer's attention: set its mask."""
        if self.merger is None:
            return None
        if kwargs.get("attention_mask") is not None:
            raise UserError("an image has padding within, which would merge; use the model's own processor")
        return args, kwargs | {"attention_mask": self.merger.bias(self._dtype)}

    def _listen(self, query: Tensor, key: Tensor, scale: float) -> None:
        self._keys, self._heads = join_heads(key), key.shape[1]

    def _join(self, number: int, module: nn.Module, args: tuple) -> None:
        """Merge rows before the norm after attention, in place, as the layer adds the MLP's output to the same tensor."""
        if self.merger is not None:
            # The layer computes `residual + mlp(norm(x))` with `residual = x`: replacing x's data shortens both.
            args[0].data = self.merger.merge(number, args[0].data, self._keys, self._heads)

    def _spread(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        """Hook after the last layer: expand rows to patches."""
        return None if self.merger is None else self.merger.spread(output)


def merger_of(vlm: VLM, states: Tensor, pixels: Tensor, reducer: Reducer, kind: type[M]) -> M:
    """Make the merger for rows `states [images, rows, d]` of pictures `pixels [..., height, width]`."""
    config = vlm.model.config
    side = block_side(config)
    height, width = (edge // (patch_side(config) * side) for edge in pixels.shape[-2:])
    aside = int(strategy(config) == "default")  # CLS
    if states.shape[1] != aside + height * width * side**2:
        raise UserError("the encoder's rows are not the image's patches; use the model's own processor")
    grids = [(1, height, width)] * len(states)
    return kind(reducer, grids, feature_layers(config), aside, device=states.device, side=side)


class Merging(Early):
    """Shortens the encoder's rows from layer to layer, and the inputs of the language model.

    counter: computes how many tokens each image keeps; None: the method decides.
    """

    def __init__(self, vlm: VLM, chosen: ReducerChoice, counter: TokenCounter | None = None):
        self.counter = counter
        super().__init__(vlm, chosen)

    def _hook(self) -> None:
        self._encoder = {}
        self._layers = EncoderHooks(self.vlm, self._start)
        self._undo.append(self._layers.remove)
        projector = self.vlm.model.get_submodule(self.vlm.spec.projector[0])
        self._before(projector, self._note)
        if self.vlm.spec.tower.units == "patch":
            self._after(projector, self._spread)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        super()._begin(module, args, kwargs)
        self._layers.merger = None

    def _end(self, *arguments: object) -> None:
        super()._end(*arguments)
        self._layers.merger = None

    def _start(self, states: Tensor) -> Merger | None:
        if self._call is None:
            return None
        merger = merger_of(self.vlm, states, self._call.get("pixel_values"), self.reducer, Merger)
        if self.counter:
            merger.counts = [self.counter.count(picture) for picture in pictures(self._call.arguments)]
        return merger

    def _note(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Hook before the projector: record which patches of each unit were merged into one row."""
        if self._layers.merger is None:
            return
        pairs = zip(self._units(), self._layers.merger.merged, strict=True)
        self.reduced_units = [unit.reduced(reduction) for unit, reduction in pairs]

    def _spread(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Hook after the projector: spread `[images, rows, d]` to `[images, patches, d]`."""
        if self._layers.merger is None or not isinstance(output, Tensor):
            return None
        merged = self._layers.merger.merged
        return torch.stack([image_rows.expand(rows) for image_rows, rows in zip(merged, output, strict=True)])
