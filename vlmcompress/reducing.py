"""The reducer of a recipe: one out of several layers of settings, and whether it goes with the model and the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlmcompress.errors import UserError

if TYPE_CHECKING:
    from vlmcompress.chosen import Chosen
    from vlmcompress.models import VLM
    from vlmcompress.recipe import Recipe

Layer = tuple[str, Mapping[str, Any]]


def layered(layers: Sequence[Layer]) -> list[Layer]:
    """The layers of a recipe, first one strongest, with `reduce` as a mapping in each, ready to be merged.

    A layer that names a method starts anew: options of weaker layers belong to another reducer and are left out.
    """
    found: list[Layer] = []
    named = False
    for origin, layer in layers:
        given = layer.get("reduce")
        if isinstance(given, str):
            from vlmcompress.chosen import split

            given = split(given, f"{origin}: reduce {given}")
        if named or "reduce" not in layer:
            layer = {key: value for key, value in layer.items() if key != "reduce"}
        else:
            layer = {**layer, "reduce": given}
            named = not isinstance(given, Mapping) or "method" in given
        found.append((origin, layer))
    return found


def chosen(given: Any, origins: Mapping[str, str]) -> Chosen | None:
    """The reducer that merged settings name; None for none. UserError for one that is none, or an option that is wrong."""
    if given is None:
        return None
    from vlmcompress.chosen import read

    origin = next((origin for key, origin in origins.items() if f"{key}.".startswith("reduce.")), "default")
    return read(given, f"{origin}: reduce")


def calibrated(recipe: Recipe) -> Chosen | None:
    """The reducer that a calibration runs behind: None where there is none, or one within the language model.

    Of the latter every block sees the same kinds of tokens as without it, those behind its layer fewer of them.
    """
    return recipe.reduce if recipe.reduce and recipe.reduce.module.STAGE != "llm" else None


def warnings(recipe: Recipe, origin: Mapping[str, Any] | None) -> list[str]:
    """What went otherwise than asked for. `origin`: where statistics came from, None for no calibration."""
    if recipe.reduce is None or origin is None or calibrated(recipe):
        return []
    return [f"calibrated on all visual tokens, as {recipe.reduce} drops some only within the language model"]


def problems(recipe: Recipe, config: Mapping[str, Any], vlm: VLM) -> list[str]:
    """Why this model cannot have its visual tokens reduced so, or the recipe's engine not serve it: a line each.

    Args:
        config: its config.json.
        vlm: the model itself; neither weights nor processor are looked at.
    """
    from vlmcompress import carried, reduction

    found = []
    try:
        before = carried.read(config)
    except UserError as error:
        return [str(error)]
    if recipe.reduce is None:
        if before is not None:
            found.append(f"the model carries the reducer {before.reducer}; add --reduce {before.reducer}, or another")
        return found
    if reason := unserved(recipe, vlm):
        found.append(reason)
    try:
        reduction.check(vlm, recipe.reduce.method, recipe.reduce.options)
    except UserError as error:
        found.append(f"reduce {recipe.reduce}: {error}")
    return found


def unserved(recipe: Recipe, vlm: VLM) -> str | None:
    """Why the recipe's engine cannot serve its reducer, and what it could serve instead; None when it can."""
    from vlmcompress.reducers import REGISTRY
    from vlmcompress.reduction import refusal

    module = recipe.reduce.module
    if recipe.engine != "vllm" or module.SERVED:
        return None
    modules = {name: REGISTRY.get(name) for name in REGISTRY.names()}
    others = [name for name, one in modules.items() if one.SERVED and refusal(vlm.spec, name) is None]
    instead = f"use one of {', '.join(others)}, or" if others else "use"
    return f"reduce {recipe.reduce}: vLLM cannot serve it ({module.WHY_NOT}); {instead} --set engine=transformers"
