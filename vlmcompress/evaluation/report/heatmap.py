"""Errors of linear layers as heat maps: one a part of the model and modality, a column a block, a row a kind of layer.

`heatmap` draws errors, `changes` the factor between two of the same layers; `legend` and `change_legend` explain the colours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from markupsafe import Markup

from vlmcompress.evaluation.report.svg import element
from vlmcompress.utils.text import percentage, times

_CELL, _ROW, _LABELS, _HEAD = 14, 18, 130, 6
_NARROW, _WIDE = (330, 40.0), (740, 34.0)  # pixels of all cells, and of one at most: in half the page, in all of it
_LETTER, _READABLE = 5.6, 24  # pixels across: of a letter of a cell's number, of the smallest cell that has one
_STEPS = 5  # steps of a legend


@dataclass
class Grid:
    """The cells of a heat map: `cells[kind][block]` is a relative squared output error; `part` is the part of the model."""

    part: str
    modality: str
    cells: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The title: part of the model and modality, or the weights for a scheme without calibration data."""
        return f"{self.part}, {'weights alone' if self.modality == 'weight' else self.modality + ' tokens'}"

    @property
    def wide(self) -> bool:
        """Whether the grid needs a panel across the page."""
        return self.blocks > 12

    @property
    def broad(self) -> bool:
        """Whether the grid needs half of the page."""
        return self.blocks > 4 and not self.wide

    @property
    def blocks(self) -> int:
        return 1 + max(block for row in self.cells.values() for block in row)


def grids(errors: Mapping[str, Mapping[str, float]]) -> list[Grid]:
    """Errors of layers as grids by part and modality; of many like layers in a block (experts) the worst."""
    by_key: dict[tuple[str, str], Grid] = {}
    for layer, by_modality in errors.items():
        part, block, kind = split(layer)
        for modality, error in by_modality.items():
            grid = by_key.setdefault((part, modality), Grid(part, modality))
            row = grid.cells.setdefault(kind, {})
            row[block] = max(error, row.get(block, 0.0))
    return list(by_key.values())


def split(layer: str) -> tuple[str, int, str]:
    """`model.language_model.layers.3.mlp.down_proj` as ("language_model", 3, "mlp.down_proj"); block 0 if none."""
    if match := re.fullmatch(r"(.+?)\.(\d+)\.(.+)", layer):
        names = [name for name in match[1].split(".") if name not in ("model", "layers", "blocks", "encoder", "layer")]
        return ".".join(names) or match[1], int(match[2]), re.sub(r"\.\d+\.", ".*.", match[3])
    part, _, kind = layer.removeprefix("model.").rpartition(".")
    return part or kind, 0, kind


def extremes(grids: list[Grid]) -> tuple[float, float]:
    """The scale that all grids share: smallest positive and largest error."""
    errors = [error for grid in grids for row in grid.cells.values() for error in row.values() if error > 0]
    return (min(errors), max(errors)) if errors else (1e-6, 1.0)


def heatmap(grid: Grid, scale: tuple[float, float]) -> Markup:
    """The errors of a grid, the deeper the colour the larger their logarithm. Cells have their percentage as a tooltip, and
    written in them where it fits."""

    def cell(_kind: str, _block: int, error: float) -> Cell:
        return Cell(percentage(error), "cell", strength(error, scale), compact(100 * error))

    return _drawn(grid, cell, f"Error of {grid.title}")


def changes(before: Grid, after: Grid, most: float) -> Markup:
    """The factors between two grids, the deeper the colour the larger their logarithm, full at `most` or its inverse; better
    and worse differ in colour. Cells have their factor as a tooltip, and written in them where it fits. Layers that only one
    of the two grids has are left out."""
    shared = {
        kind: {block: error for block, error in row.items() if block in after.cells.get(kind, {})}
        for kind, row in before.cells.items()
    }
    grid = Grid(before.part, before.modality, {kind: row for kind, row in shared.items() if row})

    def cell(kind: str, block: int, error: float) -> Cell:
        new = after.cells[kind][block]
        text = f"{percentage(error)} to {percentage(new)}"
        if error <= 0 or new <= 0:
            return Cell(text, "cell gain" if new < error else "cell loss", float(new != error), "")
        shade = abs(math.log(new / error)) / math.log(most) if most > 1 else 0.0
        css = "cell gain" if new < error else "cell loss"
        return Cell(f"{text}, {times(new / error)}", css, min(1.0, shade), compact(new / error))

    return _drawn(grid, cell, f"Change of {grid.title}") if grid.cells else Markup("")


def largest_change(pairs: Iterable[tuple[Grid, Grid]]) -> float:
    """The largest factor, up or down, between the errors of grids and of those after; at least 1."""
    factors = [
        new / error
        for before, after in pairs
        for kind, row in before.cells.items()
        for block, error in row.items()
        if error > 0 and (new := after.cells.get(kind, {}).get(block, 0.0)) > 0
    ]
    return max([1.0, *factors, *(1 / factor for factor in factors)])


def legend(scale: tuple[float, float]) -> list[Swatch]:
    """The legend of errors: the scale in steps of equal factors, from the palest."""
    low, high = scale
    steps = [low * (high / low) ** (i / (_STEPS - 1)) for i in range(_STEPS)] if high > low else [high]
    return [Swatch("", strength(error, scale), percentage(error)) for error in steps]


def change_legend(most: float) -> list[Swatch]:
    """The legend of changes: the scale from the largest gain to the largest loss."""
    if most <= 1:
        return [Swatch("", 0.0, "unchanged")]
    root = math.sqrt(most)
    gains = [Swatch("gain", shade, times(1 / factor)) for factor, shade in ((most, 1.0), (root, 0.5))]
    losses = [Swatch("loss", shade, times(factor)) for factor, shade in ((root, 0.5), (most, 1.0))]
    return [*gains, Swatch("", 0.0, "unchanged"), *losses]


class Swatch(NamedTuple):
    """A colour of a legend: its kind ("gain", "loss" or "" for an error), strength in 0 to 1, and what it stands for."""

    kind: str
    shade: float
    text: str


class Cell(NamedTuple):
    """The look of a cell; `number` is short enough to be written in it."""

    tooltip: str
    css: str
    shade: float
    number: str


def compact(value: float) -> str:
    """A number from zero on in few characters: `12`, `1.2`, `0.12`, `0.03`, `0.0002`, `<0.0001`."""
    if value == 0 or value >= 9.95:
        return f"{value:.0f}"
    if value >= 0.095:
        return f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"
    return f"{float(f'{value:.0e}'):.4f}".rstrip("0") if value >= 0.0001 else "<0.0001"


def _drawn(grid: Grid, show: Callable[[str, int, float], Cell], what: str) -> Markup:
    blocks, rows = grid.blocks, list(grid.cells.items())
    span, most = _WIDE if grid.wide else _NARROW
    cell = max(_CELL, min(most, span / blocks))
    width, height = _LABELS + cell * blocks + 4, _HEAD + _ROW * len(rows) + (20 if blocks > 1 else 4)
    marks = []
    for y, (kind, errors) in enumerate(rows):
        top = _HEAD + _ROW * y
        marks.append(element("text", kind, x=_LABELS - 8, y=top + 13, text_anchor="end"))
        for block, error in errors.items():
            look, left = show(kind, block, error), _LABELS + cell * block
            title = element("title", f"{kind}, block {block}: {look.tooltip}")
            spot = {"x": left, "y": top, "width": cell - 1, "height": _ROW - 1}
            marks.append(element("rect", title, **spot, class_=look.css, fill_opacity=look.shade))
            if cell >= _READABLE and len(look.number) * _LETTER + 2 <= cell:
                place = {"x": left + (cell - 1) / 2, "y": top + 12.5, "text_anchor": "middle"}
                marks.append(element("text", look.number, **place, class_="number"))
    if blocks > 1:
        step = next((s for s in (1, 2, 5, 10, 20) if s * cell >= 24), 50)
        places = [("block", _LABELS - 8.0, "end")]
        places += [(str(b), _LABELS + cell * (b + 0.5), "middle") for b in range(0, blocks, step)]
        marks += [element("text", text, x=x, y=height - 5, text_anchor=anchor) for text, x, anchor in places]
    label = f"{what}: {len(rows)} kinds of layer in {blocks} blocks"
    box = {"viewBox": f"0 0 {width:.0f} {height}", "width": f"{width:.0f}"}
    return element("svg", element("title", label), *marks, **box, class_="heat", role="img", aria_label=label)


def strength(error: float, scale: tuple[float, float]) -> float:
    """Opacity of a cell: 0.06 for the smallest error, 1 for the largest."""
    low, high = (math.log(max(x, 1e-12)) for x in scale)
    share = (math.log(max(error, scale[0], 1e-12)) - low) / (high - low) if high > low else 1.0
    return 0.06 + 0.94 * min(1.0, share)
