"""Apply reducers of stages "encoder" and "projected": the language model never gets the tokens that they drop.

`run_ahead` runs the language model's first layers ahead on one image and the question, for reducers that need their signals.
Both engines put the image's tokens first, the question's words behind them, and start at position 0: an image has the
positions of its grid where the family has M-RoPE, else those of a row.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.errors import UserError
from vlmcompress.hf_hooks._attach import Attachment, full_mask
from vlmcompress.hf_hooks.support import feature_layers, listens
from vlmcompress.hf_hooks.tap import joined, received, tap
from vlmcompress.hf_hooks.units import Slots, Unit
from vlmcompress.models import VLM
from vlmcompress.reducers import Grid, Reduction, Signals, TokenCounter


class Early(Attachment[Slots]):
    """Shortens the inputs of the language model: embeddings, mask, positions, and deepstack features.

    counter: computes how many tokens each image is to keep, instead of the method; None: the method decides it.
    """

    def __init__(self, vlm: VLM, module: ModuleType, options: Any, counter: TokenCounter | None = None):
        self.counter = counter
        super().__init__(vlm, module, options)

    def _hook(self) -> None:
        self._encoder: dict[str, Any] = {}  # signals `[images, n, ...]` of this call's images
        self._merged: list[Reduction] = []  # reductions decided before the projector
        self._levels: list[Tensor] = []  # this call's features for the first layers
        config = self.vlm.model.config
        if not listens(self.vlm.spec, config, self.module):
            return
        layers: Any = self.vlm.model.get_submodule(self.vlm.spec.vision_layers)
        last = feature_layers(config) - 1
        self._undo.append(tap(layers[last].self_attn, self._last))
        shallow = self.options.shallow
        if shallow is not None and shallow != last:
            self._undo.append(tap(layers[shallow].self_attn, self._shallow))
        self._same = shallow == last
        if self.module.STAGE == "encoder":
            projector = self.vlm.model.get_submodule(self.vlm.spec.projector[0])
            self._before(projector, self._merge)
            self._after(projector, self._place)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        self._encoder, self._merged = {}, []
        return super()._begin(module, args, kwargs)

    def _end(self, *arguments: object) -> None:
        super()._end(*arguments)
        self._encoder, self._merged, self._levels = {}, [], []

    def _last(self, query: Tensor, key: Tensor, scale: float) -> None:
        """Note the attention of CLS, the first token, and the patches' keys, in the layer whose output is used."""
        saliency = received(query[:, :, 0], key, scale)[:, 1:]
        self._encoder |= {"saliency": saliency, "keys": joined(key)[:, 1:], "heads": key.shape[1]}
        if self._same:
            self._encoder["windowed"] = saliency

    def _shallow(self, query: Tensor, key: Tensor, scale: float) -> None:
        self._encoder["windowed"] = received(query[:, :, 0], key, scale)[:, 1:]

    def _merge(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Hook before the projector: merge the rows of its input `[images, n, c]`."""
        units = self._units() if self._call is not None else []
        if not units:
            return None
        self.seen = []
        rows = []
        for number, (unit, features) in enumerate(zip(units, args[0], strict=True)):
            result = self._decide(unit, self._signals(unit, number, features, None))
            self._merged.append(result)
            rows.append(result.apply(features))
        return (torch.stack(rows), *args[1:]), kwargs

    def _place(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Hook behind the projector: put its rows back at their anchors, so that they go where the placeholders are."""
        if not self._merged or not isinstance(output, Tensor):
            return None
        slots = []
        for rows, result in zip(output, self._merged, strict=True):
            image = rows.new_zeros(len(result.target), *rows.shape[1:])  # one by one, so that gradients pass
            image[result.anchor] = rows
            slots.append(image)
        return torch.stack(slots)

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        embeds, cache = kwargs["inputs_embeds"], kwargs.get("past_key_values")
        rows, tokens = embeds.shape[:2]
        slots = cache.get_seq_length() if cache is not None else 0
        held = past or Slots.identity(rows, slots, embeds.device)
        if slots < held.width:
            raise UserError("the cache was cut within the prompt, which a reducer does not follow; start over")
        before = held.full(slots)
        mask = full_mask(kwargs, before)
        real = mask[:, before:].bool()
        self._levels = self._deepstack_rows(kwargs)
        embeds, changes = self._apply(embeds, units, real)
        keep = torch.ones_like(real)
        for unit, result in changes:
            keep[unit.row, unit.columns] = False
            keep[unit.row, unit.columns[result.anchor]] = True
        dropped = not keep.all()
        if not dropped and past is None:
            return kwargs
        new = Slots.of(keep, real) if dropped else Slots.identity(rows, tokens, embeds.device)
        layout = held.then(before - held.length, new)
        self._new = layout if dropped else past
        positions = self._positions(kwargs, before, slots)
        if self.options.positions == "compact":
            positions = positions - _absent(held, mask)[:, None] - (real & ~keep).cumsum(1)
        embeds = new.pick(embeds)
        return (
            kwargs
            | self._deepstack(kwargs, changes, new)
            | {
                "inputs_embeds": embeds,
                "attention_mask": self._mask(embeds, layout.mask(mask), cache, new),
                "position_ids": new.pick(positions, positions.ndim - 1),
            }
        )

    def _mask(self, embeds: Tensor, mask: Tensor, cache: Any, new: Slots) -> Any:
        """The language model's mask: `mask [b, slots]`, or Gemma 3's form of it, in which an image's tokens see each other.

        Gemma 3 knows images by `token_type_ids`. The tokens left of an image stand together, so they stay one image.
        """
        assert self._call is not None
        kinds, model = self._call.get("token_type_ids"), self.vlm.model
        if kinds is None:
            return mask
        kinds = new.pick(kinds) * new.valid
        make: Any = model.create_masks_for_generate
        return make(model.config, embeds, mask, cache, None, token_type_ids=kinds)

    def _apply(self, embeds: Tensor, units: list[Unit], real: Tensor) -> tuple[Tensor, list[tuple[Unit, Reduction]]]:
        """Put merged rows into `embeds [b, s, d]` at their anchors; returns it and the reduction of each unit."""
        if not units:
            return embeds, []
        if self.module.STAGE != "projected":  # applied already
            return embeds, list(zip(units, self._merged, strict=True))
        self.seen = []
        asks = "query" in self.module.NEEDS | getattr(self.module, "OPTIONAL", frozenset())
        words = self._words(real) if asks else None
        out, changes = embeds.clone(), []
        for number, unit in enumerate(units):
            features = embeds[unit.row, unit.columns]
            query = None if words is None else embeds[unit.row, words[unit.row]]
            result = self._decide(unit, self._signals(unit, number, features, query), count=self._count(number))
            out[unit.row, unit.columns[result.anchor]] = result.apply(features)
            changes.append((unit, result))
        return out, changes

    def _count(self, number: int) -> int | None:
        """How many tokens the encoder's image `number` is to keep; None: the method decides it."""
        assert self._call is not None
        return self.counter.count(self._call.get("pixel_values")[number]) if self.counter else None

    def _signals(self, unit: Unit, number: int, features: Tensor, query: Tensor | None) -> Signals:
        """Signals of the unit that is the encoder's image `number`."""
        signals = {name: value if name == "heads" else value[number] for name, value in self._encoder.items()}
        query = None if query is None else query.detach()
        if "ahead" in self.module.NEEDS:
            signals["ahead"] = self._run_ahead(unit, features, query)
        return Signals(unit.grid, features=features.detach(), query=query, **signals)

    def _run_ahead(self, unit: Unit, features: Tensor, query: Tensor | None) -> Signals:
        """Run the first layers on a unit and the question; returns their signals."""
        assert query is not None
        levels = [level[unit.row, unit.columns] for level in self._levels]
        rotated = self.vlm.spec.visual_grid == "thw"
        return run_ahead(self.text, features, query, unit.grid, self.options, rotated, levels)

    def _deepstack_rows(self, kwargs: dict[str, Any]) -> list[Tensor]:
        """Qwen3-VL's features for the first layers, `[b, s, d]` for each, zeros where text is; empty in other families."""
        where, rows = kwargs.get("visual_pos_masks"), []
        if where is None:
            return []
        for level in kwargs.get("deepstack_visual_embeds") or ():
            rows.append(level.new_zeros(*where.shape, level.shape[-1]))
            rows[-1][where] = level
        return rows

    def _positions(self, kwargs: dict[str, Any], before: int, slots: int) -> Tensor:
        """Positions of this call's tokens in the full sequence, `[..., b or 1, s]`."""
        tokens, device = kwargs["inputs_embeds"].shape[1], kwargs["inputs_embeds"].device
        positions = kwargs.get("position_ids")
        if positions is None:
            return torch.arange(before, before + tokens, device=device)[None]
        assert self._call is not None
        if self._call.get("position_ids") is not None:
            return positions
        # The model counted them itself: from the mask of the full sequence, or from its cache, which is shorter.
        return positions[..., -tokens:] if positions.shape[-1] > tokens else positions + (before - slots)

    def _deepstack(self, kwargs: dict[str, Any], changes: list[tuple[Unit, Reduction]], new: Slots) -> dict[str, Any]:
        """Deepstack features in the model's form, `[visual tokens, d]` for each layer, reduced as the embeddings are."""
        if not self._levels:
            return {}
        kept = new.pick(kwargs["visual_pos_masks"]) & new.valid
        reduced = []
        for full in self._levels:
            out = full.clone()
            for unit, result in changes:
                out[unit.row, unit.columns[result.anchor]] = result.apply(full[unit.row, unit.columns])
            reduced.append(new.pick(out)[kept])
        return {"visual_pos_masks": kept, "deepstack_visual_embeds": reduced}


def _absent(held: Slots, mask: Tensor) -> Tensor:
    """Number of tokens of the full sequences that `held` has dropped, `[b]`; `mask [b, s]` is that of the full sequences."""
    full = mask[:, : held.length].bool()
    return full.sum(1) - (full.gather(1, held.columns) & held.valid).sum(1)


class Enough(Exception):
    """Raised to end a forward pass when all signals are there and the rest of the model need not run."""


def positions(grid: Grid, words: int, rotated: bool, device: Any = None) -> Tensor:
    """Positions `[3, n + words]` of an image and words behind it; three equal rows unless the model has M-RoPE (`rotated`)."""
    tokens = math.prod(grid)
    if not rotated:
        return torch.arange(tokens + words, device=device).expand(3, -1)
    image = torch.stack(torch.meshgrid(*(torch.arange(side, device=device) for side in grid), indexing="ij")).flatten(1)
    text = max(grid) + torch.arange(words, device=device)
    return torch.cat([image, text.expand(3, -1)], 1)


def signals(
    grid: Grid, saliency: Tensor, keys: Tensor, heads: int, states: Tensor | None, finite: bool = False
) -> Signals:
    """Make the signals that a reducer within the language model would get.

    Args:
        grid: grid of the image, whose tokens stand first.
        saliency: `[s]`, attention of the last token in block K - 1.
        keys: `[s, heads * d]`, the keys in block K - 1, with positions.
        states: `[s, d]`, the output of block K - 1 through the final norm, where it is read.
        finite: as of `Signals`.
    """
    n = math.prod(grid)
    optional: dict[str, Any] = (
        {} if states is None else {"features": states[:n], "query": states[n:], "query_keys": keys[n:]}
    )
    return Signals(grid, saliency=saliency[:n], keys=keys[:n], heads=heads, finite=finite, **optional)


@torch.no_grad()
def run_ahead(
    text: nn.Module, rows: Tensor, query: Tensor, grid: Grid, options: Any, rotated: bool, levels: Sequence[Tensor] = ()
) -> Signals:
    """Run the first layers of transformers' language model `text`.

    Args:
        rows: `[n, d]`, the image's tokens as the language model gets them.
        query: `[q, d]`, embeddings of the question's words.
        options: options of the reducer: `layer` is K, `states` tells whether the output of block K - 1 is read.
        rotated: whether the model has M-RoPE.
        levels: `[n, d]` each, features that deepstack adds to the image's tokens behind the first blocks, in families with it.
    """
    blocks: Any = text.get_submodule("layers")
    where = positions(grid, len(query), rotated, rows.device)[:, None]
    where = where if rotated else where[0]
    image = torch.arange(len(rows) + len(query), device=rows.device)[None] < len(rows)
    deep = {"visual_pos_masks": image, "deepstack_visual_embeds": list(levels)} if levels else {}
    layer_inputs: dict[str, Any] = {}

    def hear(queries: Tensor, keys: Tensor, scale: float) -> None:
        heads = keys.shape[1]
        layer_inputs.update(saliency=received(queries[:, :, -1], keys, scale)[0], keys=joined(keys)[0], heads=heads)
        if not options.states:
            raise Enough

    def reached(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        layer_inputs["states"] = text.get_submodule("norm")(args[0])[0]
        raise Enough

    undo = [
        tap(blocks[options.layer - 1].self_attn, hear),
        blocks[options.layer].register_forward_pre_hook(reached).remove,
    ]
    try:
        with contextlib.suppress(Enough):
            text.forward(  # hooks of the model itself, a reducer's among them, are not for this
                inputs_embeds=torch.cat([rows, query])[None], position_ids=where, use_cache=False, **deep
            )
    finally:
        for each in undo:
            each()
    return signals(
        grid, layer_inputs["saliency"], layer_inputs["keys"], layer_inputs["heads"], layer_inputs.get("states")
    )
