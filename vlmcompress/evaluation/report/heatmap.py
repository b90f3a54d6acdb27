"""Errors of linear layers as heat maps: one map per model part and modality, a column per block, a row per kind of layer.

The page draws a map as a table. `errors` returns cells of errors, `changes` cells of the factors between two checkpoints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vlmcompress.utils.text import percentage, times


class Cell(NamedTuple):
    """A cell of a map or legend: the kind of colour ("gain", "loss" or "" for an error), its strength in 0 to 1, its meaning,
    and a short `number` to show in it."""

    kind: str
    shade: float
    text: str
    number: str = ""


Cells = Mapping[str, Mapping[int, Cell]]
"""Kind of layer -> block -> cell."""


@dataclass
class Grid:
    """Errors of a part of the model: `cells[kind][block]` is a relative squared output error."""

    part: str
    modality: str
    cells: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Part of the model and modality, or the weights for a scheme without calibration data."""
        return f"{self.part}, {'weights alone' if self.modality == 'weight' else self.modality + ' tokens'}"

    @property
    def blocks(self) -> int:
        return 1 + max(block for row in self.cells.values() for block in row)


def grids(errors: Mapping[str, Mapping[str, float]]) -> list[Grid]:
    """Errors of layers as grids by part and modality; for a block's experts, the worst one."""
    by_key: dict[tuple[str, str], Grid] = {}
    for layer, by_modality in errors.items():
        part, block, kind = split(layer)
        for modality, error in by_modality.items():
            row = by_key.setdefault((part, modality), Grid(part, modality)).cells.setdefault(kind, {})
            row[block] = max(error, row.get(block, 0.0))
    return list(by_key.values())


def split(layer: str) -> tuple[str, int, str]:
    """`model.language_model.layers.3.mlp.down_proj` as ("language_model", 3, "mlp.down_proj"); block 0 if none."""
    if match := re.fullmatch(r"(.+?)\.(\d+)\.(.+)", layer):
        names = [name for name in match[1].split(".") if name not in ("model", "layers", "blocks", "encoder", "layer")]
        return ".".join(names) or match[1], int(match[2]), re.sub(r"\.\d+\.", ".*.", match[3])
    part, _, kind = layer.removeprefix("model.").rpartition(".")
    return part or kind, 0, kind


def extremes(grids: Iterable[Grid]) -> tuple[float, float]:
    """The scale that all grids share: smallest positive and largest error."""
    errors = [error for grid in grids for row in grid.cells.values() for error in row.values() if error > 0]
    return (min(errors), max(errors)) if errors else (1e-6, 1.0)


def strength(error: float, scale: tuple[float, float]) -> float:
    """Opacity of a cell by the error's logarithm: 0.06 for the smallest error of the scale, 1 for the largest."""
    # Errors span orders of magnitude: equal factors are equal steps of colour, and the smallest stays visible.
    low, high = (math.log(max(x, 1e-12)) for x in scale)
    share = (math.log(max(error, scale[0], 1e-12)) - low) / (high - low) if high > low else 1.0
    return 0.06 + 0.94 * min(1.0, share)


def errors(grid: Grid, scale: tuple[float, float]) -> Cells:
    """The errors of a grid in percent; colours deepen with their logarithm."""
    return {
        kind: {block: Cell("", strength(e, scale), percentage(e), compact(100 * e)) for block, e in row.items()}
        for kind, row in grid.cells.items()
    }


def largest_change(pairs: Iterable[tuple[Grid, Grid]]) -> float:
    """The largest factor, up or down, between the errors of grids and of those after; at least 1."""
    most = 1.0
    for before, after in pairs:
        for kind, row in before.cells.items():
            for block, old in row.items():
                if old > 0 and (new := after.cells.get(kind, {}).get(block, 0.0)) > 0:
                    most = max(most, new / old, old / new)
    return most


def changes(before: Grid, after: Grid, most: float) -> Cells:
    """The factors between two grids; colours deepen with their logarithm up to `most` or its inverse, with different colours
    for better and worse. Layers in only one of the grids are left out."""
    cells: dict[str, dict[int, Cell]] = {}
    for kind, row in before.cells.items():
        for block, old in row.items():
            if (new := after.cells.get(kind, {}).get(block)) is None:
                continue
            text, css = f"{percentage(old)} to {percentage(new)}", "gain" if new < old else "loss"
            cell = Cell(css, float(new != old), text)
            if old > 0 and new > 0:
                shade = min(1.0, abs(math.log(new / old)) / math.log(most)) if most > 1 else 0.0
                cell = Cell(css, shade, f"{text}, {times(new / old)}", compact(new / old))
            cells.setdefault(kind, {})[block] = cell
    return cells


def legend(scale: tuple[float, float]) -> list[Cell]:
    """The legend of errors: the scale in steps of equal factors, from the palest."""
    steps = np.geomspace(*scale, 5).tolist() if scale[1] > scale[0] else [scale[1]]
    return [Cell("", strength(error, scale), percentage(error)) for error in steps]


def change_legend(most: float) -> list[Cell]:
    """The legend of changes: the scale from the largest gain to the largest loss."""
    middle = Cell("", 0.0, "unchanged")
    if most <= 1:
        return [middle]
    steps = ((most, 1.0), (math.sqrt(most), 0.5))
    gains = [Cell("gain", shade, times(1 / factor)) for factor, shade in steps]
    return [*gains, middle, *(Cell("loss", shade, times(factor)) for factor, shade in steps[::-1])]


def compact(value: float) -> str:
    """A non-negative number in few characters: `12`, `1.2`, `0.12`, `0.03`, `0.0002`, `<0.0001`."""
    if value == 0 or value >= 9.95:
        return f"{value:.0f}"
    if value >= 0.095:
        return f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"
    return f"{float(f'{value:.0e}'):.4f}".rstrip("0") if value >= 0.0001 else "<0.0001"
