"""Check whether a recipe may use statistics on disk: whether they are of its model, data, software and reducer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from vlmcompress.calibration.solve import QuantMethod
from vlmcompress.calibration.statistics_folder import Statistics, short, weights_hash
from vlmcompress.common import identity
from vlmcompress.data import data_hash, load_samples
from vlmcompress.errors import UserError
from vlmcompress.models import Group
from vlmcompress.recipe import Calibrate, Recipe
from vlmcompress.recipe.reducer import calibrated, same
from vlmcompress.statistics.inputs import CROSS


def problems(known: Statistics, recipe: Recipe, method: QuantMethod, blocks: Sequence[Sequence[Group]]) -> list[str]:
    """Reasons why a recipe cannot use the statistics, from descriptions alone, a line each.

    Args:
        method: method of the decoder; `blocks`: the groups of layers in each of its blocks that get it.
    """
    return [
        *known.other_model(recipe.model),
        *_other_software(known),
        *_absent(known, method, bool(recipe.kv_cache), blocks),
        *_other_settings(known, recipe.calibrate),
        *_other_resize(known, recipe),
        *_other_reducer(known, recipe),
        *_other_rotation(known, recipe),
    ]


def _other_software(known: Statistics) -> list[str]:
    """Find a difference of transformers' version, as another may name modules and compute activations in other ways."""
    was, now = (versions.get("transformers") for versions in (known.facts["created_by"], identity.versions()))
    if was == now:
        return []
    return [f"statistics {known.folder} were collected with transformers {was}, here is {now}; calibrate again"]


def _absent(known: Statistics, method: QuantMethod, kv_cache: bool, blocks: Sequence[Sequence[Group]]) -> list[str]:
    found = []
    needs, options = method.needs, cast(Any, method.options)
    if "token_weights" in needs.searches:
        found.append("tokens 'vlmq' weighs tokens with the model itself; leave out the statistics or use tokens 'off'")
    if needs.searches & {"block_scales", "finalists"}:
        found.append(
            f"objective '{options.objective}' searches with the model itself; leave out the statistics or use "
            "objective 'gram'"
        )
    if method.options.balance == "mbq" and known.facts["settings"].get("fisher") == "signs":
        found.append(
            f"balance 'mbq' weighs by gradients of labels, statistics {known.folder} hold those of signs; calibrate again "
            "without calibrate.fisher"
        )
    if "ranges" in needs.searches:
        found.append("the scheme searches with the model itself, over several blocks; leave out the statistics")
    if CROSS in needs.statistics:
        found.append(
            f"statistics {known.folder} were collected without the cross-Gram matrix, which depends on the blocks quantized "
            "before; leave out the statistics and name --calib"
        )
    if lacking := sorted(needs.statistics - {CROSS} - set(known.facts["needs"])):
        have = ", ".join(known.facts["needs"])
        found.append(
            f"statistics {known.folder} hold {have} and the scheme needs {', '.join(lacking)}, too; "
            f"{remedy(known, lacking)}"
        )
    if kv_cache and not known.facts["kv_cache"]:
        found.append(f"statistics {known.folder} hold no ranges of keys and values; calibrate with --kv-cache fp8")
    for layer, groups in enumerate(blocks):
        there = known.facts["blocks"][layer] if layer < len(known.facts["blocks"]) else {}
        for group in groups:
            if not set(group.linears) <= set(there.get(group.name, ())):
                return [*found, f"statistics {known.folder} have none of {group.linears[0]}; calibrate again"]
    return found


def remedy(known: Statistics, lacking: Iterable[str]) -> str:
    """What collects statistics with what these lack besides what they have."""
    return f"calibrate again with --needs {','.join(sorted({*known.facts['needs'], *lacking}))}"


def _other_settings(known: Statistics, asked: Calibrate) -> list[str]:
    """Find settings of the calibration that the recipe gives again with other values."""
    was = {key: value for key, value in known.facts["settings"].items() if key in Calibrate.model_fields}
    return [
        f"calibrate.{key} is {getattr(asked, key)} and statistics {known.folder} were collected with {value}; leave it out"
        for key, value in was.items()
        if key in asked.model_fields_set and getattr(asked, key) != value
    ]


def _other_reducer(known: Statistics, recipe: Recipe) -> list[str]:
    """Find a difference of the reducer, as behind another one, or none, the decoder sees other tokens."""
    was, now = known.reducer, calibrated(recipe.reduce)
    if same(was, now):
        return []
    seen = f"behind the reducer {was}" if was else "of all visual tokens"
    remedy = f"add --reduce {was}" if was else "leave out --reduce"
    again = f"calibrate with --reduce {now}" if now else "calibrate without one"
    return [f"statistics {known.folder} are {seen}; {again}, or {remedy}"]


def _other_resize(known: Statistics, recipe: Recipe) -> list[str]:
    """Find a difference of how images are made smaller, as the model sees others then."""
    was, now = known.resize, recipe.resize
    if was == now or (was is not None and was.same(now)):
        return []
    seen = f"with {was}" if was else "of images as they are"
    remedy = f"add --reduce {was}" if was else f"leave out {now}"
    again = f"calibrate with --reduce {now}" if now else "calibrate without one"
    return [f"statistics {known.folder} are {seen}; {again}, or {remedy}"]


def _other_rotation(known: Statistics, recipe: Recipe) -> list[str]:
    """Find a difference of the rotation, as the decoder's layers have other inputs behind another one, or none."""
    was, now = known.rotation, recipe.rotation
    if was == now:
        return []
    seen = f"rotated ({was['kind']}, seed {was['seed']})" if was else "not rotated"
    add = f"--rotate {was['kind']} --seed {was['seed']}" if was else "no --rotate"
    return [f"statistics {known.folder} are of the model {seen}; use {add}, or calibrate again as you quantize"]


def verify(known: Statistics, recipe: Recipe) -> None:
    """Compare hashes of the statistics' files, the model's weights and, if the recipe names them, the data.

    Raises:
        UserError: one of them has changed.
    """
    for name, file in known.facts["files"].items():
        if identity.sha256(known.folder / name) != file["sha256"]:
            raise UserError(f"{known.folder / name} is damaged, its hash is not the recorded one; calibrate again")
    was, now = known.facts["model"], weights_hash(recipe.model)
    if was["weights_sha256"] != now:
        raise UserError(known.differs("weights", was["source"], was["weights_sha256"], recipe.model, now))
    was = known.facts["calibration"]
    text, samples = was.get("text"), known.facts["settings"]["samples"]
    if recipe.calibrate.data is not None:
        count = was["samples"] - text["samples"] if text else samples
        _same_data(known, was, recipe.calibrate.data, count, recipe.seed, "--calib")
    if recipe.calibrate.text is not None:
        if not text:
            raise UserError(f"statistics {known.folder} are of no text beside the data; leave out calibrate.text")
        _same_data(known, text, recipe.calibrate.text, text["samples"], recipe.seed, "calibrate.text")


def _same_data(known: Statistics, was: Mapping[str, Any], source: str, samples: int, seed: int, key: str) -> None:
    now = data_hash(load_samples(source, samples=samples, seed=seed, text=key == "calibrate.text"))
    if now != was["sha256"]:
        before = f"{short(was['sha256'])} for '{was['source']}' with seed {known.facts['settings']['seed']}"
        raise UserError(
            f"statistics {known.folder} are of other data: sha256 of the samples is {before} and {short(now)} for "
            f"{source} with seed {seed}; leave out {key}"
        )
