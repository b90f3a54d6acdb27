"""Positions of a batch's visual tokens, and the remaining columns of its sequences.

A unit holds the positions of the tokens of one image, or of one tile in families that encode tiles. Slots are the remaining
columns of a batch's sequences, and reduce tensors to them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.models import VLM, block_side, tile_grid
from vlmcompress.reduction.methods import Grid, Reduction
from vlmcompress.utils.errors import UserError

_signature = functools.cache(inspect.signature)  # the model runs once per generated token


@dataclass(frozen=True, eq=False)
class Unit:
    """The visual tokens of one image or tile: `row` of the batch, its `columns [n]` there, and their grid.

    image: number of the image in the batch; of the tile, in families whose tiles are units of their own.
    span: first column and number of columns of that image; more than its units' if newlines are inserted.
    """

    row: int
    columns: Tensor
    grid: Grid
    image: int
    span: tuple[int, int]

    def reduced(self, reduction: Reduction) -> Reduced:
        """The unit with its reduction."""
        return Reduced(**vars(self), reduction=reduction)


@dataclass(frozen=True, eq=False)
class Reduced(Unit):
    """A unit and its reduction."""

    reduction: Reduction


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the model with images and text: its arguments by name."""

    arguments: dict[str, Any]

    @staticmethod
    def of(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Call:
        """Bind the arguments of `module(*args, **kwargs)` to their names."""
        bound = _signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
        del bound["self"]
        return Call({**bound, **bound.pop("kwargs", {})})

    def get(self, name: str) -> Any:
        """The argument of that name, or None."""
        return self.arguments.get(name)

    @property
    def has_images(self) -> bool:
        """Whether this call has images, not only text or the next token."""
        return self.get("pixel_values") is not None


def units(vlm: VLM, call: Call) -> list[Unit]:
    """Find the units of all rows, in the order of the encoder's rows; empty for a call without images."""
    if not call.has_images:
        return []
    ids = call.get("input_ids")
    if ids is None:
        raise UserError("images came with inputs_embeds; give input_ids, which say where the visual tokens are")
    # Row-major, which is the order in which transformers' `masked_scatter` puts features in.
    where = (ids == getattr(vlm.model.config, vlm.spec.image_token)).nonzero()
    parts, start = [], 0
    for number, (tokens, grids) in enumerate(_images(vlm, call, len(where))):
        part = where[start : start + tokens]
        start += len(part)
        if len(part) != tokens or (part[:, 0] != part[0, 0]).any():
            raise UserError("the prompts' image tokens do not fit the images; encode both with the model's processor")
        row, first = part[0].tolist()
        parts += [Unit(row, part[index, 1], grid, number, (first, tokens)) for grid, index in grids]
    if start != len(where):
        raise UserError("the prompts have more image tokens than the images; encode both with the model's processor")
    return parts


_Image = tuple[int, list[tuple[Grid, Any]]]
"""Number of an image's tokens, and the grids among them: shape, and an index of the image's tokens."""


def _images(vlm: VLM, call: Call, tokens: int) -> list[_Image]:
    config, kind = vlm.model.config, vlm.spec.images.grid
    if kind == "anyres":
        return _anyres(vlm, call)
    if kind in ("thw", "shapes"):
        shapes, side = call.get("image_grid_thw" if kind == "thw" else "spatial_shapes").tolist(), block_side(config)
        grids = [(frames[0] if frames else 1, h // side, w // side) for *frames, h, w in shapes]
        return [(math.prod(grid), [(grid, slice(None))]) for grid in grids]
    if kind == "patches":
        pixels, patch = call.get("pixel_values"), config.vision_config.patch_size
        grid = (1, pixels.shape[-2] // patch, pixels.shape[-1] // patch)
    else:
        grid = tile_grid(config)
    return [(math.prod(grid), [(grid, slice(None))])] * -(-tokens // math.prod(grid))


def _anyres(vlm: VLM, call: Call) -> list[_Image]:
    """Images of anyres families: the whole image and its joined tiles; newlines are in no grid, so they always stay."""
    sizes, counts = call.get("image_sizes").tolist(), call.get("batch_num_images")
    together = [1] * len(sizes) if counts is None else [n for n in counts.tolist() for _ in range(n)]
    layouts = [
        vlm.spec.layout(vlm.processor, width, height, images)
        for (height, width), images in zip(sizes, together, strict=True)
    ]
    return [(layout.tokens, layout.grids()) for layout in layouts]


def join_reductions(units: Sequence[Reduced], device: torch.device | None = None) -> Reduction:
    """Join the reductions of an image's units into one on a device (default: CPU); newlines, in no unit, are kept."""
    device = device or torch.device("cpu")

    def here(x: Tensor) -> Tensor:
        # an asynchronous copy to the CPU could be read too early
        return x.to(device, non_blocking=device.type != "cpu")

    first, tokens = units[0].span
    parent, weight = torch.arange(tokens, device=device), torch.ones(tokens, device=device)
    scale, count = torch.ones(tokens, device=device), tokens
    for unit in units:
        index, result = here(unit.columns) - first, unit.reduction
        anchor, target = index[here(result.anchor)], here(result.target)
        # From indices within the unit to indices within the image, whose newlines are in no unit.
        parent[index] = torch.where(target < 0, target, anchor[target.clamp(min=0)])
        weight[index] = here(result.weight)
        if result.scale is not None:
            scale[anchor] = here(result.scale)
        count += len(anchor) - len(index)
    joined = Reduction.join(parent, weight, count)
    if any(unit.reduction.scale is not None for unit in units):
        return replace(joined, scale=scale[joined.anchor])
    return replace(joined, plain=all(unit.reduction.plain for unit in units))


def typed(vlm: VLM, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move a processor's tensors to the model's device, pixels in the model's type."""
    device, dtype = vlm.model.device, vlm.model.dtype
    return {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in inputs.items()}


def prompt_text(vlm: VLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Mark the words of the prompt, `[b, s]` bool: no padding, placeholder or other special token."""
    wordless = special_ids(vlm.processor.tokenizer, getattr(vlm.model.config, vlm.spec.image_token))
    return mask & ~torch.isin(ids, torch.tensor(sorted(wordless), device=ids.device))


def special_ids(tokenizer: Any, image_token: int) -> set[int]:
    """Token ids of the placeholder and of all other special tokens."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | {*tokenizer.all_special_ids, image_token}


@dataclass(frozen=True, eq=False)
class Slots:
    """The remaining columns of a batch of sequences.

    columns: `[b, m]` int64, the column of the full sequence that each slot holds, ascending among the valid ones.
    valid: `[b, m]` bool, false for padding, whose column is an arbitrary dropped one and never read.
    length:  columns of the full sequences, padding included.
    """

    columns: Tensor
    valid: Tensor
    length: int

    @staticmethod
    def of(keep: Tensor, mask: Tensor) -> Slots:
        """Make the slots of tokens that `keep [b, s]` leaves of the real ones in `mask [b, s]`. Rows are padded to the longest.

        The padding is on the left, unless the full sequences are padded on the right.
        """
        left = keep & mask
        # Synchronizes with the device once per prompt: the shape of the decoder's inputs depends on it.
        width = max(1, int(left.sum(1).max()))
        right = not bool(mask[:, -1].all())
        # A stable sort by kept or not moves kept columns to one side and preserves their order; [b, s].
        order = left.int().sort(dim=1, descending=right, stable=True).indices
        columns = order[:, :width] if right else order[:, -width:]
        return Slots(columns, left.gather(1, columns), left.shape[1])

    @staticmethod
    def identity(rows: int, length: int, device: Any = None) -> Slots:
        """Make the slots in which every column is left."""
        columns = torch.arange(length, device=device).expand(rows, -1)
        return Slots(columns, torch.ones_like(columns, dtype=torch.bool), length)

    @property
    def width(self) -> int:
        """Number of slots in a row, padding included."""
        return self.columns.shape[1]

    def full(self, slots: int) -> int:
        """Length of the full sequence if these slots and the undropped tokens after them fill `slots`."""
        return slots - self.width + self.length

    def pick(self, x: Tensor, dim: int = 1) -> Tensor:
        """Reduce the `length` columns of `x` at `dim` to the slots; the batch (or 1) is the dimension before."""
        shape = [1] * (dim - 1) + list(self.columns.shape) + [1] * (x.ndim - dim - 1)
        return torch.take_along_dim(x, self.columns.to(x.device).view(shape), dim)

    def spread(self, x: Tensor) -> Tensor:
        """Put the rows `x [b, m, ...]` of the slots back at their columns, `[b, length, ...]`, zeros where there is none."""
        out = x.new_zeros(len(x), self.length + 1, *x.shape[2:])
        index = self.columns.where(self.valid, self.length).to(x.device)  # padding goes after the last column
        out[torch.arange(len(x), device=x.device)[:, None], index] = x
        return out[:, : self.length]

    def mask(self, full: Tensor) -> Tensor:
        """Reduce an attention mask `[b, length + t]` of the full sequence to the slots, `[b, m + t]`."""
        held = full[:, : self.length].gather(1, self.columns) * self.valid.to(full.dtype)
        return torch.cat([held, full[:, self.length :]], 1)

    def then(self, tokens: int, other: Slots) -> Slots:
        """Join these slots, `tokens` columns after them that are all kept, and `other` after those."""
        between = Slots.identity(len(self.columns), tokens, self.columns.device)
        parts = (self, between, other)
        starts = (0, self.length, self.length + tokens)
        columns = torch.cat([part.columns + start for part, start in zip(parts, starts, strict=True)], 1)
        return Slots(columns, torch.cat([part.valid for part in parts], 1), starts[2] + other.length)
