"""What a recipe will do to a model, and why it can't where it can't, from config.json and the weight files' headers alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from vlmcompress import models
from vlmcompress.blocks.solve import Method
from vlmcompress.calibration import statistics_folder as statistics
from vlmcompress.checkpoint import sizes as estimate
from vlmcompress.checkpoint.layer_targets import targets as config_targets
from vlmcompress.common.tensor_files import Spec
from vlmcompress.errors import UserError
from vlmcompress.models import Group, ModelSpec
from vlmcompress.numerics import Scheme
from vlmcompress.planning import budget as room
from vlmcompress.planning import fit
from vlmcompress.planning import reducer as reducing
from vlmcompress.quantizers import REGISTRY as SCHEMES
from vlmcompress.recipe import Recipe

Others = Mapping[tuple[int, str], Method]
VISION_MULTIPLE = 16  # what 8-bit matrix kernels want of both sides; tower layers with others stay as they are


@dataclass(frozen=True)
class Row:
    """One line of the plan: equal groups, of how many blocks."""

    part: str
    group: str
    linears: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    format: str
    blocks: int = 1


@dataclass(frozen=True)
class Plan:
    """What will be done.

    Attributes:
        method: what is done to the decoder; `blocks`: to which groups of each of its blocks.
        vision_method: what is done to the vision tower; `vision_groups`: to which groups.
        targets: schemes with what config.json says they apply to.
        rows: the same for people.
        bytes_before, bytes_after: of weights; exact.
        peak_bytes: of memory; an estimate.
        problems: why it can't be done, each one line; empty when it can.
        statistics: what the decoder is solved from instead of running it.
        room: what the recipe's `bits` leave to share out; sizes are the largest possible ones until it is.
        allocation: how it was shared out, as the manifest keeps it.
        tokens: of a prompt with one image, before and after the recipe's reducer (`reducing.example`).
    """

    recipe: Recipe
    spec: ModelSpec
    config: dict
    method: Method
    blocks: list[list[Group]]
    vision_method: Method | None
    vision_groups: list[Group]
    targets: list[tuple[Scheme, list[str]]]
    rows: list[Row]
    linear_layers: int
    bytes_before: int
    bytes_after: int
    peak_bytes: int
    problems: list[str]
    statistics: statistics.Statistics | None = None
    room: room.Room | None = None
    allocation: dict | None = None
    tokens: dict | None = None

    @property
    def undecided(self) -> bool:
        """Whether the widths of groups hang on statistics that have not been looked at."""
        return self.room is not None and self.allocation is None

    @property
    def needs_data(self) -> bool:
        """Whether calibration samples are needed."""
        return self.statistics is None and bool(self.method.needs or self.recipe.kv_cache or self.recipe.bits)

    @property
    def prefix(self) -> str | None:
        """Behind which blocks a block's input is observed: `float` ones, `quantized` ones, or None for not at all."""
        if self.statistics:
            return "float"
        return "quantized" if self.needs_data or self.recipe.calibrate.data else None

    def to_dict(self) -> dict:
        """For JSON."""
        return {
            "family": self.spec.family,
            "recipe": self.recipe.plain(),
            "groups": [asdict(row) for row in self.rows],
            "linear_layers": self.linear_layers,
            "decoder_blocks": len(self.blocks),
            "weights_before": self.bytes_before,
            "weights_after": self.bytes_after,
            "peak_memory_estimate": self.peak_bytes,
            "needs_calibration_data": self.needs_data,
            "prefix": self.prefix,
            "allocation": self.allocation,
            "visual_tokens": self.tokens,
            "problems": self.problems,
        }


def build(recipe: Recipe, others: Others | None = None) -> Plan:
    """The plan of a recipe. Raises `UserError` for the first thing that stands in its way."""
    plan = survey(recipe, others)
    if plan.problems:
        raise UserError(plan.problems[0])
    return plan


def survey(recipe: Recipe, others: Others | None = None, table: Mapping[str, Method] | None = None) -> Plan:
    """The plan of a recipe with everything that stands in its way. Raises `UserError` for an unusable model.

    Args:
        others: (block, group name) -> what is done to that group instead of what the recipe's scheme does.
        table: methods by name, of which groups may get any: the plan's `room` is that of these.
    """
    config = models.read_config(recipe.model)
    spec = models.spec_for(config)
    models.refuse_quantized(config)
    bones = models.skeleton(recipe.model)
    headers = models.tensor_headers(recipe.model)
    names = models.disk_names(bones, headers)

    method = Method(recipe.method, recipe.options, others or {})
    problems = reducing.problems(recipe, config, models.VLM(bones, None, spec, recipe.model))
    groups = [group for group in _decoder_groups(bones, spec, recipe, problems) if method.of(group).scheme]
    blocks: list[list[Group]] = [[] for _ in models.decoder_layers(bones, spec)]
    for group in groups:
        blocks[group.layer].append(group)
        if others or not recipe.bits:
            problems += fit.shape_problems(bones, group, method.of(group).scheme, recipe.target)
    vision_method = _vision_method(recipe)
    vision_groups = _vision_groups(bones, spec, recipe, problems) if vision_method else []

    schemes = _schemes(method, groups) | (_schemes(vision_method, vision_groups) if vision_method else {})
    problems += [problem for scheme in dict.fromkeys(schemes.values()) for problem in fit.format_problems(scheme)]
    if recipe.kv_cache and not all(blocks):
        problems.append(f"kv_cache needs a quantized layer in every decoder block; {blocks.index([])} has none")
    if not schemes and recipe.reduce is None:
        problems.append("the recipe quantizes nothing; choose another scheme or --vision, skip less, or add --reduce")
    stored = {name: Spec(entry["dtype"], tuple(entry["shape"])) for name, entry in headers.items()}
    written = estimate.output_tensors(stored, schemes, names, len(blocks) if recipe.kv_cache else 0)
    before, after = (sum(spec.nbytes for spec in specs.values()) for specs in (stored, written))
    space = None
    if (recipe.bits and not others) or table is not None:
        space = _room(recipe, problems, bones, groups, stored, names, written, table)
    any_of = replace(method, others={(-1, name): one for name, one in space.widths.items()}) if space else method
    stats = _statistics(recipe, any_of, blocks, problems)
    return Plan(
        recipe=recipe,
        spec=spec,
        config=config,
        method=method,
        blocks=blocks,
        vision_method=vision_method,
        vision_groups=vision_groups,
        targets=config_targets(schemes, names, spec),
        rows=_rows(bones, "decoder", groups, None if space else schemes)
        + _rows(bones, "vision", vision_groups, schemes),
        linear_layers=len(schemes),
        bytes_before=before,
        bytes_after=space.largest if space else after,
        peak_bytes=_peak(recipe, before, bones, blocks, config, method, stats),
        problems=_once(problems),
        statistics=stats,
        room=space,
        tokens=None if problems else reducing.example(recipe),
    )


def _peak(
    recipe: Recipe,
    weights: int,
    bones: nn.Module,
    blocks: list[list[Group]],
    config: dict,
    method: Method,
    stats: statistics.Statistics | None,
) -> int:
    runs = bool(method.needs or recipe.kv_cache or recipe.bits) and not stats
    return estimate.peak_bytes(
        weights,
        [[fit.shapes(bones, group) for group in block] for block in blocks],
        config,
        samples=recipe.calibrate.samples if runs else 0,
        tokens=recipe.calibrate.max_length or estimate.TOKENS,
        grams="gram" in stats.facts["needs"] if stats else None,
    )


def _room(recipe: Recipe, problems: list[str], *shapes: Any) -> room.Room | None:
    """What the recipe's `bits` leave to share out."""
    try:
        return room.measure(recipe, *shapes)
    except UserError as error:
        problems.append(str(error))
        return None


def _once(problems: list[str]) -> list[str]:
    """One of the problems that differ only in the number of the block."""
    return list({re.sub(r"\.\d+\.", ".*.", problem): problem for problem in reversed(problems)}.values())[::-1]


def _skipped(recipe: Recipe, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in recipe.skip)


def _decoder_groups(bones: nn.Module, spec: ModelSpec, recipe: Recipe, problems: list[str]) -> list[Group]:
    """The decoder's groups without what is skipped. The rest of a group can still be smoothed only if none is skipped."""
    groups = []
    for group in models.resolve(bones, spec):
        kept = tuple(name for name in group.linears if not _skipped(recipe, name))
        if len(kept) == len(group.linears):
            groups.append(group)
        elif kept:
            groups.append(replace(group, linears=kept, smooth=None, fused=group.fused and len(kept) > 1))
            if group.fused:
                left = next(name for name in group.linears if name not in kept)
                problems.append(f"skip: {left} is left but not {kept[0]}, and engines fuse them; skip both or neither")
    for pattern in recipe.skip:
        linears = models.linear_names(bones)
        if not any(re.search(pattern, name) for name in linears):
            problems.append(f"skip: '{pattern}' matches no linear layer; names look like {linears[-2]}")
    return groups


def _schemes(method: Method, groups: list[Group]) -> dict[str, Scheme]:
    """Linear layer -> its number formats."""
    return {name: scheme for group in groups for name in group.linears if (scheme := method.of(group).scheme)}


def _statistics(
    recipe: Recipe, method: Method, blocks: list[list[Group]], problems: list[str]
) -> statistics.Statistics | None:
    """The statistics that the recipe names, looked at."""
    if recipe.calibrate.stats is None:
        return None
    try:
        found = statistics.read(Path(recipe.calibrate.stats))
    except UserError as error:
        problems.append(str(error))
        return None
    problems += found.problems(recipe, method, blocks)
    return found


def _vision_method(recipe: Recipe) -> Method | None:
    if recipe.vision == "bf16":
        return None
    module = SCHEMES.get(recipe.vision)
    return Method(module, module.Options())


def _vision_groups(bones: nn.Module, spec: ModelSpec, recipe: Recipe, problems: list[str]) -> list[Group]:
    """The tower's groups whose sides divide, each as a whole: an engine may fuse its layers."""
    wanted = [
        group
        for group in models.vision_linears(bones, spec)
        if not any(_skipped(recipe, name) for name in group.linears)
    ]
    fits = [
        group
        for group in wanted
        if not any(side % VISION_MULTIPLE for shape in fit.shapes(bones, group) for side in shape)
    ]
    if not fits:
        why = f"with sides that are multiples of {VISION_MULTIPLE}" if wanted else "left to quantize"
        problems.append(f"the vision tower has no linear layer {why}; use --vision bf16")
    return fits


def _rows(bones: nn.Module, part: str, groups: list[Group], schemes: Mapping[str, Scheme] | None) -> list[Row]:
    """The groups, equal ones of different blocks in one row; without schemes these are still to be allocated."""
    counts: dict[Row, int] = {}
    for group in groups:
        linears = tuple(name.split(".")[-1] for name in group.linears)
        form = fit.label(schemes[group.linears[0]]) if schemes else "to be allocated"
        row = Row(part, group.name, linears, tuple(fit.shapes(bones, group)), form)
        counts[row] = counts.get(row, 0) + 1
    return [replace(row, blocks=count) for row, count in counts.items()]
