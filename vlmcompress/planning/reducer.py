"""The reducer of a recipe: one out of several layers of settings, and whether it goes with the model and the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlmcompress.errors import UserError

if TYPE_CHECKING:
    from vlmcompress.common.progress import Progress
    from vlmcompress.models import VLM
    from vlmcompress.recipe import Recipe
    from vlmcompress.recipe.layers import Layer
    from vlmcompress.recipe.reducer import Chosen
    from vlmcompress.reducers._counter import Counter

TYPICAL = (1024, 768)
"""Width and height of the image that examples are of."""


def layered(layers: Sequence[Layer]) -> list[Layer]:
    """The layers of a recipe, first one strongest, with `reduce` as a mapping in each, ready to be merged.

    A layer that names a method starts anew: options of weaker layers belong to another reducer and are left out.
    """
    found: list[Layer] = []
    named = False
    for origin, layer in layers:
        given = layer.get("reduce")
        if isinstance(given, str):
            from vlmcompress.recipe.reducer import split

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
    from vlmcompress.recipe.reducer import read

    origin = next((origin for key, origin in origins.items() if f"{key}.".startswith("reduce.")), "default")
    return read(given, f"{origin}: reduce")


def calibrated(recipe: Recipe) -> Chosen | None:
    """The reducer that a calibration runs behind: None where there is none, or one within the language model.

    Of the latter every block sees the same kinds of tokens as without it, those behind its layer fewer of them.
    """
    return recipe.reduce if recipe.reduce and recipe.reduce.module.STAGE != "llm" else None


def learns(recipe: Recipe) -> bool:
    """Whether the reducer has to learn from calibration images first."""
    return counted(recipe) or (recipe.reduce is not None and getattr(recipe.reduce.options, "thresholds", ()) is None)


def counted(recipe: Recipe) -> bool:
    """Whether the engine has to be told how many tokens an image keeps, before its encoder finds out."""
    return recipe.engine == "vllm" and recipe.reduce is not None and recipe.reduce.takes_count


def counter(recipe: Recipe, vlm: VLM, batches: Sequence[Mapping[str, Any]]) -> Counter | None:
    """What says that from an image's pixels, fitted to calibration samples `batches`; None where nothing has to."""
    if not counted(recipe):
        return None
    from vlmcompress.reduction import learning as thresholds

    return thresholds.counter(vlm, batches, recipe.reduce)


def settled(
    recipe: Recipe, vlm: VLM, batches: Sequence[Mapping[str, Any]], known: Chosen | None, progress: Progress
) -> Recipe:
    """The recipe with everything that its reducer learns in place: from a file that it names, or from samples.

    Args:
        batches: calibration samples, from `encode`.
        known: the reducer that statistics were collected behind; what it has learnt is taken from there.
    """
    if not hasattr(getattr(recipe.reduce, "options", None), "thresholds"):
        return recipe
    from vlmcompress.reduction import learning as thresholds

    if known is not None and same(known, recipe.reduce):
        return recipe.model_copy(update={"reduce": known})
    ready = thresholds.learn(vlm, batches, recipe.reduce, progress) if batches else thresholds.known(vlm, recipe.reduce)
    return recipe.model_copy(update={"reduce": ready})


def same(known: Chosen | None, asked: Chosen | None) -> bool:
    """Whether a reducer is the one that is asked for, apart from what it has learnt or will read from a file."""
    if known is None or asked is None or known.method != asked.method:
        return known is asked
    mine, wanted = known.plain(), asked.plain()
    if not isinstance(wanted.get("thresholds"), tuple | list):
        wanted["thresholds"] = mine.get("thresholds")
    return {**mine, "thresholds": mine.get("thresholds")} == wanted


def warnings(recipe: Recipe, origin: Mapping[str, Any] | None) -> list[str]:
    """What went otherwise than asked for. `origin`: where statistics came from, None for no calibration."""
    if recipe.reduce is None or origin is None or calibrated(recipe):
        return []
    return [f"calibrated on all visual tokens, as {recipe.reduce} drops some only within the language model"]


def label(reducer: Chosen) -> str:
    """As the command line has it, without the numbers that it has learnt."""
    return f"{reducer.asked_for} (learnt thresholds)" if reducer.learnt else str(reducer)


def example(recipe: Recipe) -> dict[str, Any] | None:
    """Tokens of a prompt with one typical image before and after the recipe's reducer, by the processor alone.

    `after` is None where the count depends on what the image shows. None without a reducer, and where the processor cannot say.
    """
    if recipe.reduce is None:
        return None
    from vlmcompress.reduction import cost as planning

    try:
        found = planning.plan(recipe.model, [TYPICAL], "", [recipe.reduce])
    except UserError:  # about the processor, which `check` and calibration look at
        return None
    (cost,) = found.reduced.values()
    size = "x".join(map(str, TYPICAL))
    return {"image": size, "before": found.full.visual, "after": cost.visual if cost else None, "text": found.text}


def tokens_text(reducer: Chosen, tokens: Mapping[str, Any] | None) -> str:
    """What a reducer does to an image, in words. `tokens`: what `example` returns."""
    if tokens is None:
        return label(reducer)
    if tokens["after"] is None:
        return f"{label(reducer)}: fewer than the {tokens['before']:,} visual tokens of a {tokens['image']} image, as it shows"
    return f"{label(reducer)}: {tokens['before']:,} -> {tokens['after']:,} visual tokens of a {tokens['image']} image"


def problems(recipe: Recipe, config: Mapping[str, Any], vlm: VLM) -> list[str]:
    """Why this model cannot have its visual tokens reduced so, or the recipe's engine not serve it: a line each.

    Args:
        config: its config.json.
        vlm: the model itself; neither weights nor processor are looked at.
    """
    from vlmcompress import reduction
    from vlmcompress.checkpoint import reducer_block as carried

    try:
        before = carried.read(config)
    except UserError as error:
        return [f"{vlm.path}: {error}"]
    if recipe.reduce is None:
        if before is None:
            return []
        return [f"the model carries the reducer {before.reducer}; add --reduce {before.reducer}, or another"]
    if getattr(recipe.reduce.options, "vtu", False):
        return [f"reduce {recipe.reduce}: vtu is for evaluation and saves nothing; leave it out"]
    try:
        reduction.check(vlm, recipe.reduce.method, recipe.reduce.options)
    except UserError as error:
        return [f"reduce {recipe.reduce}: {error}"]
    return [reason] if (reason := unserved(recipe, config)) else []


def unserved(recipe: Recipe, config: Mapping[str, Any]) -> str | None:
    """Why the recipe's engine cannot serve its reducer, and what it could serve instead; None when it can."""
    if recipe.engine != "vllm":
        return None
    from vlmcompress.engines.vllm.plugin import refusal

    reasons = [reason for name in config.get("architectures") or [] if (reason := refusal(name, recipe.reduce))]
    return f"reduce {recipe.reduce}: {reasons[0]}; or --set engine=transformers" if reasons else None
