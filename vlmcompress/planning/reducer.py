"""What a recipe's reducer of visual tokens means for a run: whether it can be, what it learns, what it does to an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcompress import reduction
from vlmcompress.checkpoint import reducer_block
from vlmcompress.engines.vllm.plugin import refusal
from vlmcompress.errors import UserError
from vlmcompress.models import Source
from vlmcompress.recipe import Recipe
from vlmcompress.recipe.reducer import ReducerChoice
from vlmcompress.reduction import cost

TYPICAL = (1024, 768)
"""Width and height of the image that examples are of."""


@dataclass(frozen=True)
class VisualTokens:
    """What becomes of visual tokens.

    Attributes:
        reducer: as the recipe asks for it.
        counted: an engine has to be told how many tokens an image keeps, before its encoder finds out.
        example: tokens of a prompt with one typical image, before and after, by the processor alone: keys `image` (its size),
            `before`, `after` (None where the count depends on what the image shows) and `text`; None where the processor
            cannot say.
    """

    reducer: ReducerChoice
    counted: bool
    example: dict[str, Any] | None

    @property
    def learns(self) -> bool:
        """Whether calibration images have to be looked at first, for thresholds or counts."""
        return self.counted or self.reducer.options.unlearnt

    @property
    def text(self) -> str:
        """What the reducer does to an image, in words."""
        return tokens_text(self.reducer, self.example)


def visual_tokens(recipe: Recipe, example: bool) -> VisualTokens | None:
    """What a recipe that stands means for visual tokens; None without a reducer. `example`: whether to work one out."""
    reducer = recipe.reduce
    if reducer is None:
        return None
    counted = recipe.engine == "vllm" and reducer.takes_count
    return VisualTokens(reducer, counted, _example(recipe.model, reducer) if example else None)


def tokens_text(reducer: ReducerChoice, example: Mapping[str, Any] | None) -> str:
    """What a reducer does to an image, in words; `example` as in `VisualTokens`."""
    if example is None:
        return reducer.label
    before, image = f"{example['before']:,}", example["image"]
    if example["after"] is None:
        return f"{reducer.label}: fewer than the {before} visual tokens of a {image} image, as it shows"
    return f"{reducer.label}: {before} -> {example['after']:,} visual tokens of a {image} image"


def _example(model: Path, reducer: ReducerChoice) -> dict[str, Any] | None:
    try:
        found = cost.plan(model, [TYPICAL], "", [reducer])
    except UserError:  # about the processor, which `check` and calibration look at
        return None
    (reduced,) = found.reduced.values()
    after = reduced.visual if reduced else None
    size = "x".join(map(str, TYPICAL))
    return {"image": size, "before": found.full.visual, "after": after, "text": found.text}


def problems(recipe: Recipe, source: Source) -> list[str]:
    """Why this model cannot have its visual tokens reduced so, or the recipe's engine not serve it: a line each."""
    try:
        before = reducer_block.read(source.config)
    except UserError as error:
        return [f"{source.path}: {error}"]
    if recipe.reduce is None:
        if before is None:
            return []
        return [f"the model carries the reducer {before.reducer}; add --reduce {before.reducer}, or another"]
    if recipe.reduce.options.vtu:
        return [f"reduce {recipe.reduce}: vtu is for evaluation and saves nothing; leave it out"]
    try:
        reduction.check(source.vlm, recipe.reduce.method, recipe.reduce.options)
    except UserError as error:
        return [f"reduce {recipe.reduce}: {error}"]
    return [reason] if (reason := unserved(recipe, source.config)) else []


def unserved(recipe: Recipe, config: Mapping[str, Any]) -> str | None:
    """Why the recipe's engine cannot serve its reducer, and what it could serve instead; None when it can."""
    reducer = recipe.reduce
    if recipe.engine != "vllm" or reducer is None:
        return None
    reasons = [reason for name in config.get("architectures") or [] if (reason := refusal(name, reducer))]
    return f"reduce {reducer}: {reasons[0]}; or --set engine=transformers" if reasons else None
