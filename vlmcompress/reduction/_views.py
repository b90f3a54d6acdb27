"""Apply reducers that choose among the images of a prompt before the encoder: dropped views are not encoded at all.

An image is known by its name: the words before it, of the same line ("front camera: <image>"). They are embedded by the
language model's own table, as are the words of the question, those behind the last image (all words, where none are).
An image without a name matches nothing. Names and marks around the tokens of a dropped image stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import reducers
from vlmcompress.reducers import Reduction, Signals
from vlmcompress.reducers.litevlm import matches
from vlmcompress.reduction.pixels import Pixels
from vlmcompress.reduction.units import Call, Reduced, Unit


@dataclass(frozen=True, eq=False)
class Words:
    """Columns of a prompt's words: those of each image's name, and those of the question."""

    names: list[list[int]]
    question: list[int]


class Views(Pixels):
    """Leaves images out of the encoder's input, and their tokens out of the language model's."""

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        super()._begin(module, args, kwargs)
        assert self._call is not None
        if self._kept() is None or self.vlm.spec.visual_grid == "thw":  # there the tower takes tokens one by one
            return None
        kept = torch.tensor([len(one.anchor) > 0 for one in self._merged])
        ids = self._call.get("input_ids").clone()
        for unit in self.seen:
            if not len(unit.reduction.anchor):
                ids[unit.row, unit.columns] = self._text  # no features come for these; their columns go
        pixels = self._call.get("pixel_values")
        return (), self._call.arguments | {"input_ids": ids, "pixel_values": pixels[kept.to(pixels.device)]}

    @property
    def _text(self) -> int:
        """Id of a token that is no placeholder."""
        return int(getattr(self.vlm.model.config, self.vlm.spec.image_token) == 0)

    def _choose(self, units: list[Unit], call: Call) -> list[Reduction]:
        ids = call.get("input_ids")
        mask = call.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]
        words = self._words(mask.bool())
        stays: list[bool] = []
        for row in range(len(ids)):  # units stand in the order of rows
            own = [unit for unit in units if unit.row == row]
            if own:
                signals = self._signals_of(ids[row], find(self._tokenizer, ids[row], words[row], own))
                result = reducers.reduce(self.module, signals, self.options)
                stays += (result.target >= 0).tolist()
        found = []
        for unit, stay in zip(units, stays, strict=True):
            n = len(unit.columns)
            index = torch.arange(n if stay else 0, device=unit.columns.device)
            found.append(Reduction.keep(index, n))
            self.seen.append(Reduced(**vars(unit), reduction=found[-1]))
        return found

    @property
    def _tokenizer(self) -> Any:
        return self.vlm.processor.tokenizer

    def _signals_of(self, ids: Tensor, words: Words) -> Signals:
        """Signals of the images of one prompt `ids [s]`."""
        embed = self.vlm.model.get_input_embeddings()
        query = embed(ids[words.question])
        rows = [embed(ids[name]).mean(0) if name else query.new_zeros(query.shape[1]) for name in words.names]
        names = [self._tokenizer.decode(ids[name]) for name in words.names]
        found = matches(names, self._tokenizer.decode(ids[words.question]))
        return Signals((len(names), 1, 1), features=torch.stack(rows), query=query, saliency=found)


def find(tokenizer: Any, ids: Tensor, words: Tensor, units: list[Unit]) -> Words:
    """Find the names of the images and the question of one prompt.

    Args:
        ids: `[s]` token ids; words: `[s]` bool, true for words (no mark, no placeholder).
        units: one for each image, in the order of the prompt.
    """
    names = []
    for unit in units:
        name: list[int] = []
        for column in words[: unit.span[0]].nonzero().flatten().tolist()[::-1]:
            if (name and column != name[0] - 1) or "\n" in tokenizer.decode(ids[column : column + 1]):
                break
            name.insert(0, column)
        names.append(name)
    end = sum(units[-1].span)
    columns: list[int] = words.nonzero().flatten().tolist()
    return Words(names, [column for column in columns if column >= end] or columns)
