"""Draw the effect of a reducer on an image: kept parts unchanged, merged ones tinted, dropped ones gray and dark.

`decide` records a reducer's decisions on the images of one prompt by running the model; `sheet` draws them.
"""

from __future__ import annotations

import colorsys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from vlmcompress.models import VLM, Layout
from vlmcompress.models.devices import float_products
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks import KeptWhole, attach
from vlmcompress.reduction.hooks.units import typed
from vlmcompress.reduction.methods import Reduction
from vlmcompress.reduction.support import family_problem
from vlmcompress.utils.errors import UserError

SIDE = 480  # pixels of a panel's longer side
GAP, LINE = 16, 20
INK, PAPER, EDGE = "#1a1a1a", "#ffffff", "#8a8a8a"
Color = tuple[int, int, int]


@dataclass(frozen=True)
class Counts:
    """Counts of an image's `tokens`: how many stay as they are, are `merged` (`into` how many), or are `dropped`."""

    tokens: int
    kept: int
    merged: int
    into: int
    dropped: int

    @staticmethod
    def of(reduction: Reduction) -> Counts:
        """Count the tokens of one image."""
        sizes = reduction.sizes
        kept, into = int((sizes == 1).sum()), int((sizes > 1).sum())
        dropped = int((reduction.target < 0).sum())
        tokens = len(reduction.target)
        return Counts(tokens, kept, tokens - kept - dropped, into, dropped)

    @property
    def left(self) -> int:
        """Number of rows that the language model gets."""
        return self.kept + self.into

    def __str__(self) -> str:
        parts = [f"{self.kept} as they are", f"{self.merged} merged into {self.into}", f"{self.dropped} dropped"]
        listed = [part for part, count in zip(parts, (self.kept, self.into, self.dropped), strict=True) if count]
        return f"{self.left} of {self.tokens} tokens: {', '.join(listed)}"


def sheet(
    images: Sequence[Image.Image], layouts: Sequence[Layout], columns: Sequence[tuple[str, Sequence[Reduction]]]
) -> Image.Image:
    """Draw one picture: for each image a row with the image and a panel for each of `columns` (caption, reductions).

    Where a family shows the model both tiles and the whole image, they are drawn one below the other.
    """
    rows = []
    for number, (image, layout) in enumerate(zip(images, layouts, strict=True)):
        scale = SIDE / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        filter_ = Image.Resampling.NEAREST if scale > 4 else Image.Resampling.LANCZOS
        large = image.convert("RGB").resize(size, filter_)
        panels = [_captioned([large], f"{image.width}x{image.height}", f"{layout.tokens} visual tokens")]
        for caption, reductions in columns:
            drawn = panel(large, image.size, layout, reductions[number])
            panels.append(_captioned(drawn, caption, str(Counts.of(reductions[number]))))
        rows.append(_joined(panels, GAP, across=True))
    return _joined([*rows, _legend()], GAP, margin=GAP)


def panel(large: Image.Image, size: tuple[int, int], layout: Layout, reduction: Reduction) -> list[Image.Image]:
    """Draw one image, once for each set of pieces that do not overlap.

    Args:
        large: the image in the size of the drawing.
        size: size of the original, whose pixels the layout is in.
        reduction: reduction of all the layout's tokens.
    """
    gray = ImageOps.grayscale(large).point(lambda level: level * 0.3).convert("RGB")
    sizes, anchors = reduction.sizes.tolist(), set(reduction.anchor.tolist())
    targets, cells, start, drawings = reduction.target.tolist(), layout.cells(), 0, []
    # Tokens are numbered through all pieces, in their order.
    for pieces in _layers(layout):
        tokens = range(start, start + sum(layout.pieces[number].tokens for number in pieces))
        start = tokens.stop
        canvas = Image.new("RGB", large.size, EDGE)  # edges show where no token is
        draw = ImageDraw.Draw(canvas)
        for token in tokens:
            cell = cells[token]
            box = cell and _scaled(cell, size, large.size)
            if not box or box[0] >= box[2] or box[1] >= box[3]:
                continue
            row = targets[token]
            color = color_of(row) if row >= 0 and sizes[row] > 1 else None
            part = (gray if row < 0 else large).crop(box)
            canvas.paste(Image.blend(part, Image.new("RGB", part.size, color), 0.6) if color else part, box[:2])
            inner = (box[0], box[1], box[2] - 1, box[3] - 1)
            if token in anchors and min(box[2] - box[0], box[3] - box[1]) > 5:
                draw.rectangle(inner, outline=color or PAPER, width=3 if color else 1)
        drawings.append(canvas)
    return drawings


def color_of(row: int) -> Color:
    """The colour of tokens that are merged into one output; adjacent rows get very different colours."""
    red, green, blue = colorsys.hsv_to_rgb(row * 0.618034 % 1, 0.85, (1.0, 0.75)[row // 7 % 2])
    return round(red * 255), round(green * 255), round(blue * 255)


def _layers(layout: Layout) -> list[list[int]]:
    """Group the numbers of neighbouring pieces so that no two of a group overlap and they can be drawn on one image."""
    layers: list[list[int]] = []
    for number, piece in enumerate(layout.pieces):
        if layers and not any(_overlap(piece.box, layout.pieces[other].box) for other in layers[-1]):
            layers[-1].append(number)
        else:
            layers.append([number])
    return layers


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    across, down = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return across > 1e-6 and down > 1e-6


def _scaled(cell: tuple[float, ...], size: tuple[int, int], large: tuple[int, int]) -> tuple[int, int, int, int]:
    """Scale a cell to pixels of the drawing, cut off at its edges; neighbouring cells meet."""
    x, y = (
        [min(max(round(cell[axis + end] * large[axis] / size[axis]), 0), large[axis]) for end in (0, 2)]
        for axis in (0, 1)
    )
    return x[0], y[0], x[1], y[1]


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _captioned(drawings: Sequence[Image.Image], title: str, caption: str) -> Image.Image:
    lines = [(title, _font(15)), (caption, _font(13))]
    text = Image.new("RGB", (max(round(font.getlength(line)) + 1 for line, font in lines), LINE * len(lines)), PAPER)
    for number, (line, font) in enumerate(lines):
        ImageDraw.Draw(text).text((0, number * LINE), line, fill=INK, font=font)
    return _joined([text, _joined(drawings, GAP)])


def _joined(parts: Sequence[Image.Image], gap: int = 0, *, across: bool = False, margin: int = 0) -> Image.Image:
    """Paste drawings onto paper, one below the other or, with `across`, side by side."""
    lengths = [part.width if across else part.height for part in parts]
    length = sum(lengths) + gap * (len(parts) - 1) + 2 * margin
    width = max(part.height if across else part.width for part in parts) + 2 * margin
    canvas, at = Image.new("RGB", (length, width) if across else (width, length), PAPER), margin
    for part, extent in zip(parts, lengths, strict=True):
        canvas.paste(part, (at, margin) if across else (margin, at))
        at += extent + gap
    return canvas


def _legend() -> Image.Image:
    """Draw the legend of the marks."""
    marks: list[tuple[str, str | Color, str | Color]] = [
        ("bright: stays as it is", PAPER, INK),
        ("one colour: merged into one; thick edge: where it is put", color_of(0), color_of(0)),
        ("dark: dropped", "#303030", "#303030"),
        ("flat gray: never shown to the model", EDGE, EDGE),
    ]
    font = _font(13)
    width = sum(LINE + 8 + round(font.getlength(text)) + GAP for text, *_ in marks)
    canvas, x = Image.new("RGB", (width, LINE), PAPER), 0
    draw = ImageDraw.Draw(canvas)
    for text, fill, edge in marks:
        draw.rectangle((x, 2, x + LINE - 6, LINE - 4), fill=fill, outline=edge)
        draw.text((x + LINE, 0), text, fill=INK, font=font)
        x += LINE + 8 + round(font.getlength(text)) + GAP
    return canvas


@torch.no_grad()
def decide(vlm: VLM, inputs: dict[str, Tensor], layouts: Sequence[Layout], chosen: ReducerChoice) -> list[Reduction]:
    """Decide the reduction of each image.

    Args:
        inputs: inputs of one prompt, from the model's processor.
        layouts: layouts of its images, in the order of the prompt.
        chosen: the reducer, which is attached while the prompt runs.
    """
    if reason := family_problem(vlm.spec, chosen.method):
        raise UserError(f"--reduce {chosen}: {reason}")
    with warnings.catch_warnings(), attach(vlm, chosen) as attached, float_products(vlm.model):
        warnings.simplefilter("ignore", KeptWhole)  # `prompt_cost.too_small` tells it of each image
        vlm.model(**typed(vlm, inputs), logits_to_keep=1)
    parts = attached.images()  # or tiles, of which an image has several
    reductions = []
    for layout in layouts:
        joined: list[Reduction] = []
        while parts and sum(len(part.target) for part in joined) < layout.tokens:
            joined.append(parts.pop(0))
        reductions.append(Reduction.concat(joined))
    if parts or [len(reduction.target) for reduction in reductions] != [layout.tokens for layout in layouts]:
        raise ValueError("the reducer saw other images than the processor made")
    return reductions
