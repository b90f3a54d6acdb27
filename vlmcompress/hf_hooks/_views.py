"""Apply reducers that choose among the images of a prompt before the encoder: those left out are not encoded at all.

Which ones stay, and what stands where one is left out, says `views`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.hf_hooks import views
from vlmcompress.hf_hooks.pixels import Pixels
from vlmcompress.hf_hooks.units import Call, Reduced, Unit
from vlmcompress.reducers import Reduction


class Views(Pixels):
    """Leaves images out of the encoder's input, and all but one of their tokens out of the language model's."""

    def _hook(self) -> None:
        super()._hook()
        self._stays: list[bool] = []  # of this call's images

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        self._stays = []
        super()._begin(module, args, kwargs)
        assert self._call is not None
        if self._kept() is None or self.vlm.spec.visual_grid == "thw":  # there the tower takes tokens one by one
            return None
        ids = self._call.get("input_ids").clone()
        for unit, stay in zip(self.seen, self._stays, strict=True):
            if not stay:
                ids[unit.row, unit.columns] = self._stand_in  # no features come for these
        pixels = self._call.get("pixel_values")
        kept = torch.tensor(self._stays, device=pixels.device)
        return (), self._call.arguments | {"input_ids": ids, "pixel_values": pixels[kept]}

    @property
    def _tokenizer(self) -> Any:
        return self.vlm.processor.tokenizer

    @property
    def _stand_in(self) -> int:
        return views.stand_in(self._tokenizer)

    def _choose(self, units: list[Unit], call: Call) -> list[Reduction]:
        ids = call.get("input_ids")
        mask = call.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]
        words = self._words(mask.bool())
        for row in range(len(ids)):  # units stand in the order of rows
            if spans := [unit.span for unit in units if unit.row == row]:
                found = views.find(self._tokenizer, ids[row], words[row], spans)
                self._stays += views.stays(self.chosen, self._tokenizer, self._embed, found)
        for unit, stay in zip(units, self._stays, strict=True):
            n = len(unit.columns)
            index = torch.arange(n if stay else 1, device=unit.columns.device)
            self.seen.append(Reduced(**vars(unit), reduction=Reduction.keep(index, n)))
        return [unit.reduction for unit in self.seen]

    def _embed(self, ids: Tensor) -> Tensor:
        """Rows `[n, d]` of the language model's table for `ids [n]`."""
        table: Any = self.vlm.model.get_input_embeddings()
        return table(ids.to(table.weight.device))

    def _kept(self) -> Tensor | None:
        """Mark the tokens that are encoded, `[tokens of all images]` bool; None when all are."""
        if all(self._stays):
            return None
        parts = [torch.full((len(unit.columns),), stay) for unit, stay in zip(self.seen, self._stays, strict=True)]
        return torch.cat(parts)

    def _apply(self, embeds: Tensor, units: list[Unit], real: Tensor) -> tuple[Tensor, list[tuple[Unit, Reduction]]]:
        """Put the token that stands for it into `embeds [b, s, d]` where an image is left out."""
        embeds, changes = super()._apply(embeds, units, real)
        if units and not all(self._stays):
            gone = [unit for unit, stay in zip(units, self._stays, strict=True) if not stay]
            rows = torch.tensor([unit.row for unit in gone], device=embeds.device)
            columns = torch.tensor([int(unit.columns[0]) for unit in gone], device=embeds.device)
            embeds = embeds.clone()
            embeds[rows, columns] = self._embed(torch.tensor([self._stand_in])).to(embeds)
        return embeds, changes
