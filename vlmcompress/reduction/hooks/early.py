"""Apply reducers of stages "encoder" and "projected", which drop tokens before the language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.reduction.hooks._attach import Attachment, full_mask, merged_rows
from vlmcompress.reduction.hooks.pixels import pictures, unit_pixels
from vlmcompress.reduction.hooks.tap import join_heads, received, tap
from vlmcompress.reduction.hooks.units import Reduced, Slots, Unit
from vlmcompress.reduction.methods import Signals
from vlmcompress.reduction.support import feature_layers, needs_encoder, reads_pixels
from vlmcompress.utils.errors import UserError


class Early(Attachment):
    """Shortens the inputs of the language model: embeddings, mask, positions, and deepstack features."""

    def _hook(self) -> None:
        self._encoder: dict[str, Any] = {}  # signals `[images, n, ...]` of this call's images
        config = self.vlm.model.config
        if not needs_encoder(self.reducer):
            return
        layers: Any = self.vlm.model.get_submodule(self.vlm.spec.vision_layers)
        last = feature_layers(config) - 1
        # The layer whose output is used, as in VisionZip: for LLaVA's `vision_feature_layer=-2` the second to last.
        self._undo.append(tap(layers[last].self_attn, self._last))
        shallow = self.reducer.shallow
        if shallow is not None and shallow != last:
            self._undo.append(tap(layers[shallow].self_attn, self._shallow))
        self._same = shallow == last
        if self.reducer.STAGE == "encoder":
            projector = self.vlm.model.get_submodule(self.vlm.spec.projector[0])
            self._before(projector, self._merge)
            self._after(projector, self._place)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        self._encoder = {}
        return super()._begin(module, args, kwargs)

    def _end(self, *arguments: object) -> None:
        super()._end(*arguments)
        self._encoder = {}

    def _last(self, query: Tensor, key: Tensor, scale: float) -> None:
        """Record the attention of CLS, the first token, and the patches' keys, in the layer whose output is used."""
        # Only the query of CLS, [b, heads, d]: one row of the attention map instead of n, with any kernel.
        saliency = received(query[:, :, 0], key, scale)[:, 1:]
        self._encoder |= {"saliency": saliency, "keys": join_heads(key)[:, 1:], "heads": key.shape[1]}
        if self._same:
            self._encoder["windowed"] = saliency

    def _shallow(self, query: Tensor, key: Tensor, scale: float) -> None:
        self._encoder["windowed"] = received(query[:, :, 0], key, scale)[:, 1:]

    def _merge(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Hook before the projector: merge the rows of its input `[images, n, c]`."""
        units = self._units() if self._call is not None else []
        if not units:
            return None
        self.reduced_units = []
        images = enumerate(zip(units, args[0], strict=True))
        results = self._decide(units, [self._signals(unit, number, features) for number, (unit, features) in images])
        rows = [result.apply(features) for result, features in zip(results, args[0], strict=True)]
        return (torch.stack(rows), *args[1:]), kwargs

    def _place(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Hook after the projector: put its rows back at their anchors, so that they go where the placeholders are."""
        if self._call is None or not self._call.has_images or not isinstance(output, Tensor):
            return None
        slots = []
        for rows, unit in zip(output, self.reduced_units, strict=True):
            # transformers' `get_placeholder_mask` counts features against placeholders, so there have to be as many as before.
            image = rows.new_zeros(len(unit.columns), *rows.shape[1:])  # one by one, so that gradients pass
            image[unit.reduction.anchor] = rows
            slots.append(image)
        return torch.stack(slots)

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        embeds, cache = kwargs["inputs_embeds"], kwargs.get("past_key_values")
        slots = cache.get_seq_length() if cache is not None else 0
        held = past or Slots.identity(len(embeds), slots, embeds.device)
        if slots < held.width:
            raise UserError("the cache was cut within the prompt, which a reducer does not follow; start over")
        before = held.full(slots)
        mask = full_mask(kwargs, before)
        real = mask[:, before:].bool()
        embeds, reduced = self._apply(embeds, units, real)
        self._new = past
        left = self._remaining(reduced, real, held, before)
        if left is None:
            return kwargs
        new, layout = left
        positions = self._positions(kwargs, before, slots)
        # Only here the decoder's rows are reduced.
        embeds = new.pick(embeds)
        return (
            kwargs
            | self._deepstack(kwargs, reduced, new)
            | {
                "inputs_embeds": embeds,
                # A mask of ones, never None: with neither mask nor cache, `find_packed_sequence_indices` of
                # transformers/masking_utils.py treats gaps between positions as boundaries of packed sequences. Can go when it
                # allows gaps.
                "attention_mask": self._mask(embeds, layout.mask(mask), cache, new),
                "position_ids": new.pick(positions, positions.ndim - 1),
            }
        )

    def _mask(self, embeds: Tensor, mask: Tensor, cache: Any, new: Slots) -> Any:
        """The language model's mask: `mask [b, slots]`, or Gemma 3's form of it, in which an image's tokens see each other.

        Gemma 3 identifies images by `token_type_ids`. The remaining tokens of an image are adjacent, so they stay one image.
        """
        assert self._call is not None
        kinds, model = self._call.get("token_type_ids"), self.vlm.model
        if kinds is None:
            return mask
        kinds = new.pick(kinds) * new.valid
        # The model itself calls transformers/models/gemma3/modeling_gemma3.py::create_masks_for_generate with these types.
        make: Any = model.create_masks_for_generate
        return make(model.config, embeds, mask, cache, None, token_type_ids=kinds)

    def _apply(self, embeds: Tensor, units: list[Unit], real: Tensor) -> tuple[Tensor, list[Reduced]]:
        """Put merged rows into `embeds [b, s, d]` at their anchors; returns it and the units with their reductions."""
        if not units:
            return embeds, []
        if self.reducer.STAGE != "projected":  # applied already
            return embeds, self.reduced_units
        self.reduced_units = []
        if reads_pixels(self.reducer):
            self._encoder["pixels"] = self._pixels(units)
        features = [embeds[unit.row, unit.columns] for unit in units]
        self._decide(units, [*map(self._signals, units, range(len(units)), features)])
        return merged_rows(embeds, self.reduced_units), self.reduced_units

    def _pixels(self, units: list[Unit]) -> list[Tensor]:
        """The pixels of this call's units."""
        assert self._call is not None
        packed = self.vlm.spec.images.grid == "thw"
        pixels = self._call.get("pixel_values") if packed else pictures(self._call.arguments)
        return [*unit_pixels(pixels, [unit.grid for unit in units], packed, self.vlm.processor.image_processor)]

    def _signals(self, unit: Unit, number: int, features: Tensor) -> Signals:
        """Signals of the unit that is the encoder's image `number`."""
        signals = {name: value if name == "heads" else value[number] for name, value in self._encoder.items()}
        return Signals(unit.grid, features=features.detach(), **signals)

    def _positions(self, kwargs: dict[str, Any], before: int, slots: int) -> Tensor:
        """Positions of this call's tokens in the full sequence, `[..., b or 1, s]`."""
        tokens, device = kwargs["inputs_embeds"].shape[1], kwargs["inputs_embeds"].device
        positions = kwargs.get("position_ids")
        if positions is None:
            return torch.arange(before, before + tokens, device=device)[None]
        assert self._call is not None
        if self._call.get("position_ids") is not None:
            return positions
        # The model computed them from the mask of the full sequence, or from its cache, which is shorter.
        return positions[..., -tokens:] if positions.shape[-1] > tokens else positions + (before - slots)

    def _deepstack(self, kwargs: dict[str, Any], units: list[Reduced], new: Slots) -> dict[str, Any]:
        """Qwen3-VL's features for the first blocks, `[visual tokens, d]` each, reduced as the embeddings are; else nothing."""
        visual, levels = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
        if visual is None or not levels:
            return {}
        # Padding repeats an arbitrary column, which may be visual.
        kept = new.pick(visual) & new.valid
        reduced = []
        for level in levels:
            # [visual tokens, d] -> [b, s, d], as units refer to tokens by column.
            full = level.new_zeros(*visual.shape, level.shape[-1])
            full[visual] = level
            reduced.append(new.pick(merged_rows(full, units))[kept])
        return {"visual_pos_masks": kept, "deepstack_visual_embeds": reduced}
