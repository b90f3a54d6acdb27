"""Check whether a recipe may use statistics on disk: whether they are of its model, data, software and reducer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from vlmcompress.models import Group
from vlmcompress.models.data import Reading, data_hash, load_samples
from vlmcompress.numerics.statistics.inputs import CROSS
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.calibration.statistics_folder import Statistics, short
from vlmcompress.recipe import Calibrate, Recipe
from vlmcompress.recipe import adapter as adapters
from vlmcompress.reduction.choice import calibrated, same
from vlmcompress.utils import identity
from vlmcompress.utils.errors import UserError


def problems(
    statistics: Statistics, recipe: Recipe, method: QuantMethod, blocks: Sequence[Sequence[Group]]
) -> list[str]:
    """Reasons why a recipe cannot use the statistics, from descriptions alone, a line each.

    Args:
        method: method of the decoder; `blocks`: the groups of layers in each of its blocks that get it.
    """
    return [
        *statistics.other_model(recipe.model),
        *_other_software(statistics),
        *_absent(statistics, method, bool(recipe.kv_cache), blocks),
        *_other_settings(statistics, recipe.calibrate),
        *_other_resize(statistics, recipe),
        *_other_reducer(statistics, recipe),
        *_other_rotation(statistics, recipe),
        *_other_adapter(statistics, recipe),
    ]


def _other_software(statistics: Statistics) -> list[str]:
    """Find a difference of transformers' version, as another may name modules and compute activations in other ways."""
    was, now = (versions.get("transformers") for versions in (statistics.facts["created_by"], identity.versions()))
    if was == now:
        return []
    return [f"statistics {statistics.folder} were collected with transformers {was}, here is {now}; calibrate again"]


def _absent(
    statistics: Statistics, method: QuantMethod, kv_cache: bool, blocks: Sequence[Sequence[Group]]
) -> list[str]:
    lines = []
    needs, options = method.needs, cast(Any, method.options)
    if "block_scales" in needs.searches:
        lines.append(
            f"objective '{options.objective}' searches with the model itself; leave out the statistics or use "
            "objective 'gram'"
        )
    if "ranges" in needs.searches:
        lines.append("the scheme searches with the model itself, over several blocks; leave out the statistics")
    if CROSS in needs.statistics:
        lines.append(
            f"statistics {statistics.folder} were collected without the cross-Gram matrix, which depends on the "
            "blocks quantized before; leave out the statistics and name --calib"
        )
    if lacking := sorted(needs.statistics - {CROSS} - set(statistics.facts["needs"])):
        have = ", ".join(statistics.facts["needs"])
        lines.append(
            f"statistics {statistics.folder} hold {have} and the scheme needs {', '.join(lacking)}, too; "
            f"{remedy(statistics, lacking)}"
        )
    if kv_cache and not statistics.facts["kv_cache"]:
        lines.append(f"statistics {statistics.folder} hold no ranges of keys and values; calibrate with --kv-cache fp8")
    for layer, groups in enumerate(blocks):
        there = statistics.facts["blocks"][layer] if layer < len(statistics.facts["blocks"]) else {}
        for group in groups:
            if not set(group.linears) <= set(there.get(group.name, ())):
                return [*lines, f"statistics {statistics.folder} have none of {group.linears[0]}; calibrate again"]
    return lines


def remedy(statistics: Statistics, lacking: Iterable[str]) -> str:
    """What collects statistics with what these lack besides what they have."""
    return f"calibrate again with --needs {','.join(sorted({*statistics.facts['needs'], *lacking}))}"


def _other_settings(statistics: Statistics, calibrate: Calibrate) -> list[str]:
    """Find settings of the calibration that the recipe gives again with other values."""
    was = {key: value for key, value in statistics.facts["settings"].items() if key in Calibrate.model_fields}
    return [
        f"calibrate.{key} is {getattr(calibrate, key)} and statistics {statistics.folder} were collected with {value}; "
        "leave it out"
        for key, value in was.items()
        if key in calibrate.model_fields_set and getattr(calibrate, key) != value
    ]


def _other_reducer(statistics: Statistics, recipe: Recipe) -> list[str]:
    """Find a difference of the reducer, as behind another one, or none, the decoder sees other tokens."""
    was, now = statistics.reducer, calibrated(recipe.reduce)
    if same(was, now):
        return []
    description = f"behind the reducer {was}" if was else "of all visual tokens"
    remedy = f"add --reduce {was}" if was else "leave out --reduce"
    again = f"calibrate with --reduce {now}" if now else "calibrate without one"
    return [f"statistics {statistics.folder} are {description}; {again}, or {remedy}"]


def _other_resize(statistics: Statistics, recipe: Recipe) -> list[str]:
    """Find a difference of how images are made smaller, as the model sees others then."""
    was, now = statistics.resize, recipe.resize
    if was == now or (was is not None and was.same(now)):
        return []
    description = f"with {was}" if was else "of images as they are"
    remedy = f"add --reduce {was}" if was else f"leave out {now}"
    again = f"calibrate with --reduce {now}" if now else "calibrate without one"
    return [f"statistics {statistics.folder} are {description}; {again}, or {remedy}"]


def _other_rotation(statistics: Statistics, recipe: Recipe) -> list[str]:
    """Find a difference of the rotation, as the decoder's layers have other inputs behind another one, or none."""
    was, now = statistics.rotation, recipe.rotation
    if was == now:
        return []
    description = f"rotated ({was['kind']}, seed {was['seed']})" if was else "not rotated"
    add = f"--rotate {was['kind']} --seed {was['seed']}" if was else "no --rotate"
    return [
        f"statistics {statistics.folder} are of the model {description}; use {add}, or calibrate again as you quantize"
    ]


def _other_adapter(statistics: Statistics, recipe: Recipe) -> list[str]:
    """Find a difference of the merged adapter, as the decoder has other weights with another one, or none."""
    was, now = statistics.facts.get("adapter"), adapters.sha256(recipe.adapter)
    if was == now:
        return []
    which = "with another adapter" if was and now else "with an adapter" if was else "without the adapter"
    return [f"statistics {statistics.folder} are of the model {which}; calibrate again as you quantize"]


def verify(statistics: Statistics, recipe: Recipe) -> None:
    """Compare hashes of the statistics' files, the model's weights and, if the recipe names them, the data.

    Raises:
        UserError: one of them has changed.
    """
    for name, file in statistics.facts["files"].items():
        if identity.sha256(statistics.folder / name) != file["sha256"]:
            raise UserError(f"{statistics.folder / name} is damaged, its hash is not the recorded one; calibrate again")
    was, now = statistics.facts["model"], identity.weights_hash(recipe.model)
    if was["weights_sha256"] != now:
        raise UserError(statistics.differs("weights", was["source"], was["weights_sha256"], recipe.model, now))
    was = statistics.facts["calibration"]
    text, samples = was.get("text"), statistics.facts["settings"]["samples"]
    if recipe.calibrate.data is not None:
        mixed = samples // 2 if was.get("skipped") else was["samples"] - text["samples"] if text else 0
        count = mixed if text else samples
        _same_data(statistics, was, recipe, count, "--calib")
    if recipe.calibrate.text is not None:
        if not text:
            raise UserError(f"statistics {statistics.folder} are of no text beside the data; leave out calibrate.text")
        _same_data(statistics, text, recipe, text["samples"], "calibrate.text")


def _same_data(statistics: Statistics, was: Mapping[str, Any], recipe: Recipe, samples: int, key: str) -> None:
    settings, seed, skipped = recipe.calibrate, recipe.seed, statistics.facts["calibration"].get("skipped", {})
    text = key == "calibrate.text"
    source = str(settings.text if text else settings.data)
    reading = Reading({} if text else settings.columns, settings.skip_bad)
    loaded = load_samples(source, samples=samples, seed=seed, text=text, reading=reading)
    now = data_hash([sample for sample in loaded if sample.name not in skipped])
    if now != was["sha256"]:
        before = f"{short(was['sha256'])} for '{was['source']}' with seed {statistics.facts['settings']['seed']}"
        raise UserError(
            f"statistics {statistics.folder} are of other data: sha256 of the samples is {before} and {short(now)} for "
            f"{source} with seed {seed}; leave out {key}"
        )
