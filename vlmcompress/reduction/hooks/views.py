"""Choose among the images of a prompt by their names before any is encoded, and replace the others.

An image's name is the text before it on the same line ("front camera: <image>"). Names are embedded with the language model's
embedding table, and so are the words of the question, which are those after the last image (or all words if there are none).
An image without a name matches nothing, and of images that match equally the first ones stay. The choice depends on text only,
not on pixels.

An image that is left out keeps one token, at the position of its first one, since engines refuse an image without tokens. It
is the embedding of a full stop, which changed the demo models' answers least: 119 and 120 of 120 answers were the same as
without any token, the largest divergence was 0.002 (`stand_in.py` of commit 5ff363c; with zeros or the image's own mark 0.13).
Names and marks around the image stay.

`Views` applies such a reducer: images that are left out are not encoded at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.reduction import methods
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks.early import Early
from vlmcompress.reduction.hooks.units import Call, Reduced, Unit
from vlmcompress.reduction.methods import Reduction, Signals
from vlmcompress.reduction.methods.litevlm import matches

STAND_IN = "."


@dataclass(frozen=True)
class Words:
    """Token ids of a prompt's words: those of each image's name, and those of the question."""

    names: list[list[int]]
    question: list[int]


def find_question(tokenizer: Any, ids: Tensor, words: Tensor, spans: Sequence[tuple[int, int]]) -> Words:
    """Find the names of the images and the question of one prompt.

    Args:
        tokenizer: the model's tokenizer, to find the ends of lines.
        ids: `[s]` token ids.
        words: `[s]` bool, true for words (no mark, no placeholder).
        spans: first column and number of columns of each image, in the order of the prompt.
    """
    token_ids, names = ids.tolist(), []
    for start, _ in spans:
        name: list[int] = []
        for column in words[:start].nonzero().flatten().tolist()[::-1]:
            if (name and column != name[0] - 1) or "\n" in tokenizer.decode(token_ids[column : column + 1]):
                break
            name.insert(0, column)
        names.append([token_ids[column] for column in name])
    columns: list[int] = words.nonzero().flatten().tolist()
    question = [column for column in columns if column >= sum(spans[-1])] or columns
    return Words(names, [token_ids[column] for column in question])


def kept_images(chosen: ReducerChoice, tokenizer: Any, embed: Callable[[Tensor], Tensor], words: Words) -> list[bool]:
    """Choose among the images of one prompt: whether each is kept. A single image is, without embedding anything.

    `embed` returns rows `[n, d]` of the language model's embedding table for ids `[n]`.
    """
    if len(words.names) == 1:
        return [True]

    def rows(ids: Sequence[int]) -> Tensor:
        return embed(torch.tensor(ids, dtype=torch.int64)).float()

    query = rows(words.question)
    features = [rows(name).mean(0) if name else query.new_zeros(query.shape[1]) for name in words.names]
    scores = matches([tokenizer.decode(name) for name in words.names], tokenizer.decode(words.question))
    signals = Signals((len(features), 1, 1), features=torch.stack(features), query=query, saliency=scores)
    return (methods.reduce(chosen.reducer, signals).target >= 0).tolist()


def stand_in(tokenizer: Any) -> int:
    """Id of the text token whose embedding replaces an image that is left out."""
    ids: list[int] = tokenizer.encode(STAND_IN, add_special_tokens=False)
    return ids[-1]


def tokens_left(full: int, images: int, chosen: ReducerChoice) -> int:
    """Number of remaining tokens of `images` images of one size, which have `full` tokens in total."""
    stay: int = chosen.reducer.budget((images, 1, 1))
    return full * stay // images + images - stay


class Views(Early):
    """Leaves images out of the encoder's input, and all but one of their tokens out of the language model's."""

    def _hook(self) -> None:
        super()._hook()
        self._kept: list[bool] = []  # of this call's images
        if self.vlm.spec.images.grid == "thw":
            self._patches: Tensor  # which of all images' patches the tower gets, `[patches]` bool
            tower = self.vlm.model.get_submodule(self.vlm.spec.vision[0])
            self._before(tower, self._leave_out)
            self._after(tower, self._put_back)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        self._kept = []
        super()._begin(module, args, kwargs)
        assert self._call is not None
        if units := self._units():
            self._choose(units, self._call)
        # A tower with grid `thw` takes the patches of all images as one sequence.
        if all(self._kept) or self.vlm.spec.images.grid == "thw":
            return None
        ids = self._call.get("input_ids").clone()
        for unit, stay in zip(self.reduced_units, self._kept, strict=True):
            if not stay:
                ids[unit.row, unit.columns] = self._stand_in  # there are no features for these
        pixels = self._call.get("pixel_values")
        kept = torch.tensor(self._kept, device=pixels.device)
        return (), self._call.arguments | {"input_ids": ids, "pixel_values": pixels[kept]}

    def _leave_out(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Hook before a tower: leave in `[patches, d]`, or `[1, patches, c, p, p]`, those of images that stay."""
        if all(self._kept):
            return None
        call = Call.of(module, args, kwargs)
        name = "hidden_states" if call.get("hidden_states") is not None else "pixel_values"  # its first argument
        patches, grid = call.get(name), call.get("grid_thw")
        kept = torch.tensor(self._kept, device=grid.device)
        self._patches = kept.repeat_interleave(grid.prod(-1)).to(patches.device)
        left = patches[self._patches] if patches.ndim == 2 else patches[:, self._patches]
        return (left,), {key: value for key, value in kwargs.items() if key != name} | {"grid_thw": grid[kept]}

    def _put_back(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Hook after a tower: put rows, deepstack's too, where those of all images are; `Early` leaves out the others."""
        if all(self._kept) or output is None:
            return

        def spread(rows: Tensor, kept: Tensor) -> Tensor:
            full = rows.new_zeros(len(kept), *rows.shape[1:])
            full[kept.to(rows.device)] = rows
            return full

        if output.pooler_output is None:  # patches are merged after the tower, by the grids of all images
            output.last_hidden_state = spread(output.last_hidden_state, self._patches)
            return
        parts = [
            torch.full((len(unit.columns),), stay) for unit, stay in zip(self.reduced_units, self._kept, strict=True)
        ]
        kept = torch.cat(parts)
        output.pooler_output = spread(output.pooler_output, kept)
        if getattr(output, "deepstack_features", None):
            output.deepstack_features = [spread(level, kept) for level in output.deepstack_features]

    @property
    def _tokenizer(self) -> Any:
        return self.vlm.processor.tokenizer

    @property
    def _stand_in(self) -> int:
        return stand_in(self._tokenizer)

    def _choose(self, units: list[Unit], call: Call) -> None:
        """Decide which of a call's images stay."""
        ids = call.get("input_ids")
        mask = call.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]
        words = self._words(mask.bool())
        for row in range(len(ids)):  # units stand in the order of rows
            if spans := [unit.span for unit in units if unit.row == row]:
                named = find_question(self._tokenizer, ids[row], words[row], spans)
                self._kept += kept_images(self.chosen, self._tokenizer, self._embed, named)
        self.reduced_units = []
        for unit, stay in zip(units, self._kept, strict=True):
            n = len(unit.columns)
            index = torch.arange(n if stay else 1, device=unit.columns.device)
            self.reduced_units.append(unit.reduced(Reduction.keep(index, n)))

    def _embed(self, ids: Tensor) -> Tensor:
        """Rows `[n, d]` of the language model's table for `ids [n]`."""
        table: Any = self.vlm.model.get_input_embeddings()
        return table(ids.to(table.weight.device))

    def _apply(self, embeds: Tensor, units: list[Unit], real: Tensor) -> tuple[Tensor, list[Reduced]]:
        """Put the replacement token into `embeds [b, s, d]` for each image that is left out."""
        embeds, reduced = super()._apply(embeds, units, real)
        if units and not all(self._kept):
            dropped = [unit for unit, stay in zip(units, self._kept, strict=True) if not stay]
            rows = torch.tensor([unit.row for unit in dropped], device=embeds.device)
            columns = torch.tensor([int(unit.columns[0]) for unit in dropped], device=embeds.device)
            embeds = embeds.clone()
            embeds[rows, columns] = self._embed(torch.tensor([self._stand_in])).to(embeds)
        return embeds, reduced
