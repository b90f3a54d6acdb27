"""A recipe's reducer of visual tokens in a plan: what it learns, and its effect on a typical image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcompress.quantization.plan import prompt_cost
from vlmcompress.recipe import Recipe
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.resize import Resize
from vlmcompress.utils.errors import UserError

TYPICAL = (1024, 768)
"""Width and height of the image that examples are of."""


@dataclass(frozen=True)
class VisualTokens:
    """A recipe's reduction of visual tokens.

    Attributes:
        reducer: the recipe's reducer, or None.
        counted: the number of tokens depends on the image, and the engine needs it before its encoder runs, so a
            `TokenCounter` is fitted.
        example: tokens of a prompt with one typical image, before and after, by the processor alone: keys `image` (its size),
            `before`, `after` (None if the count depends on the image's content) and `text`; None if the processor can't
            compute them.
        resize: the resizing of images before the reducer, or None.
    """

    reducer: ReducerChoice | None
    counted: bool
    example: dict[str, Any] | None
    resize: Resize | None = None

    @property
    def learns(self) -> bool:
        """Whether thresholds or counts are learned from calibration images."""
        return self.counted or (self.reducer is not None and self.reducer.reducer.needs_thresholds)

    @property
    def text(self) -> str:
        """The effect on a typical image, in words."""
        resize, reducer, example = self.resize, self.reducer, self.example
        label = " + ".join(([str(resize)] if resize else []) + ([reducer.label] if reducer else []))
        if example is None:
            return label
        before, image = f"{example['before']:,}", example["image"]
        if example["after"] is None:
            return f"{label}: fewer than the {before} visual tokens of a {image} image, as it shows"
        return f"{label}: {before} -> {example['after']:,} visual tokens of a {image} image"


def visual_tokens(recipe: Recipe, example: bool) -> VisualTokens | None:
    """Describe what a recipe does to visual tokens; None if it neither reduces them nor makes images smaller.

    Args:
        example: whether to count the tokens of an example, for which the recipe must have no problem.
    """
    reducer, resize = recipe.reduce, recipe.resize
    if reducer is None and resize is None:
        return None
    counted = recipe.engine == "vllm" and reducer is not None and reducer.takes_count
    tokens = _example(recipe.inputs_folder, reducer, resize) if example else None
    return VisualTokens(reducer, counted, tokens, resize)


def _example(model: Path, reducer: ReducerChoice | None, resize: Resize | None) -> dict[str, Any] | None:
    if resize and not resize.settled:  # which depends on the calibration images
        return None
    try:
        counts = prompt_cost.prompt_costs(model, [TYPICAL], "", [reducer] if reducer else [], resize=resize)
    except UserError:  # about the processor, which `check` and calibration look at
        return None
    reduced = list(counts.reduced.values())[-1]  # by resizing and reducer together
    after = reduced.visual if reduced else None
    size = "x".join(map(str, TYPICAL))
    return {"image": size, "before": counts.full.visual, "after": after, "text": counts.text}
