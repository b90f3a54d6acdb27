"""Check whether a recipe may use statistics on disk: whether they are of its model, data, software and reducer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from vlmcompress.models import Group
from vlmcompress.models.data import Reading, data_hash, load_samples
from vlmcompress.numerics.statistics.inputs import CROSS
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.calibration.statistics_folder import Statistics, short
from vlmcompress.recipe import Recipe
from vlmcompress.recipe import adapter as adapters
from vlmcompress.reduction.choice import calibrated, same
from vlmcompress.utils import identity
from vlmcompress.utils.errors import UserError


def statistics_problems(
    statistics: Statistics, recipe: Recipe, method: QuantMethod, blocks: Sequence[Sequence[Group]]
) -> list[str]:
    """Reasons why a recipe cannot use the statistics, from descriptions alone, a line each.

    Args:
        method: method of the decoder; `blocks`: the groups of layers in each of its blocks that get it.
    """
    folder, facts, calibrate = statistics.folder, statistics.facts, recipe.calibrate
    lines = list(statistics.other_model(recipe.model))
    # Another version of transformers may name modules and compute activations in other ways.
    was, now = (versions.get("transformers") for versions in (facts["created_by"], identity.versions()))
    if was != now:
        lines.append(f"statistics {folder} were collected with transformers {was}, here is {now}; calibrate again")
    lines += _absent(statistics, method, bool(recipe.kv_cache), blocks)
    for key, value in facts["settings"].items():  # settings that the recipe sets to other values
        if key in calibrate.model_fields_set and getattr(calibrate, key) != value:
            lines.append(
                f"calibrate.{key} is {getattr(calibrate, key)} and statistics {folder} were collected with {value}; "
                "leave it out"
            )
    # Of smaller images, or after another reducer, the decoder sees other tokens.
    before, resize = statistics.resize, recipe.resize
    if before != resize and (before is None or not before.same(resize)):
        remedy = f"add --reduce {before}" if before else f"leave out {resize}"
        lines.append(_of_others(statistics, f"with {before}" if before else "of images as they are", resize, remedy))
    reducer, chosen = statistics.reducer, calibrated(recipe.reduce)
    if not same(reducer, chosen):
        remedy = f"add --reduce {reducer}" if reducer else "leave out --reduce"
        described = f"after the reducer {reducer}" if reducer else "of all visual tokens"
        lines.append(_of_others(statistics, described, chosen, remedy))
    rotated = statistics.rotation
    if rotated != recipe.rotation:  # layers have other inputs
        described = f"rotated ({rotated['kind']}, seed {rotated['seed']})" if rotated else "not rotated"
        use = f"--rotate {rotated['kind']} --seed {rotated['seed']}" if rotated else "no --rotate"
        lines.append(f"statistics {folder} are of the model {described}; use {use}, or calibrate again as you quantize")
    merged, adapter = facts.get("adapter"), adapters.adapter_sha256(recipe.adapter)
    if merged != adapter:
        which = "with another adapter" if merged and adapter else "with an adapter" if merged else "without the adapter"
        lines.append(f"statistics {folder} are of the model {which}; calibrate again as you quantize")
    return lines


def _of_others(statistics: Statistics, described: str, now: object, remedy: str) -> str:
    """A line about other visual tokens; `now`: the reducer or `resize` of the recipe."""
    again = f"calibrate with --reduce {now}" if now else "calibrate without one"
    return f"statistics {statistics.folder} are {described}; {again}, or {remedy}"


def _absent(
    statistics: Statistics, method: QuantMethod, kv_cache: bool, blocks: Sequence[Sequence[Group]]
) -> list[str]:
    lines = []
    needs, options = method.needs, cast(Any, method.options)
    if "block_scales" in needs.searches:
        lines.append(
            f"objective '{options.objective}' searches with the model itself; leave out the statistics or use "
            "--set options.objective=gram"
        )
    if "ranges" in needs.searches:
        lines.append("the scheme searches with the model itself, over several blocks; leave out the statistics")
    if CROSS in needs.statistics:
        lines.append(
            f"statistics {statistics.folder} were collected without the cross-Gram matrix, which depends on the "
            "blocks quantized before; leave out the statistics and name --calib"
        )
    if missing := sorted(needs.statistics - {CROSS} - set(statistics.facts["needs"])):
        have = ", ".join(statistics.facts["needs"])
        lines.append(
            f"statistics {statistics.folder} hold {have} and the scheme needs {', '.join(missing)}, too; "
            f"{remedy(statistics, missing)}"
        )
    if kv_cache and not statistics.facts["kv_cache"]:
        lines.append(f"statistics {statistics.folder} hold no ranges of keys and values; calibrate with --kv-cache fp8")
    for layer, groups in enumerate(blocks):
        there = statistics.facts["blocks"][layer] if layer < len(statistics.facts["blocks"]) else {}
        for group in groups:
            if not set(group.linears) <= set(there.get(group.name, ())):
                return [*lines, f"statistics {statistics.folder} have none of {group.linears[0]}; calibrate again"]
    return lines


def remedy(statistics: Statistics, missing: Iterable[str]) -> str:
    """The command that collects these statistics together with the missing ones."""
    return f"calibrate again with --needs {','.join(sorted({*statistics.facts['needs'], *missing}))}"


def verify_statistics(statistics: Statistics, recipe: Recipe) -> None:
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
            raise UserError(f"statistics {statistics.folder} are of no text next to the data; leave out calibrate.text")
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
