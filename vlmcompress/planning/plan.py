"""Plan what a recipe will do to a model, with every reason why it cannot, from config.json and the weight files' headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from vlmcompress import models, targets
from vlmcompress.blocks.solve import QuantMethod
from vlmcompress.calibration import statistics_folder
from vlmcompress.calibration.statistics_folder import Statistics
from vlmcompress.checkpoint import sizes
from vlmcompress.checkpoint.layer_targets import layers_of
from vlmcompress.common.layer_names import Layers
from vlmcompress.common.registry import SCHEMES
from vlmcompress.errors import UserError
from vlmcompress.hf_hooks import scorer_file
from vlmcompress.models import Group, Source
from vlmcompress.numerics import Scheme
from vlmcompress.planning import attention, fit, memory, reducer, reuse, rotation
from vlmcompress.planning.budget import Budget, budget_of
from vlmcompress.planning.reducer import VisualTokens
from vlmcompress.recipe import Recipe
from vlmcompress.statistics.inputs import CROSS

Others = Mapping[tuple[int, str], QuantMethod]
VISION_MULTIPLE = 16  # divides both sides of a matrix in 8-bit kernels; tower layers with other sides stay as they are


@dataclass(frozen=True)
class Row:
    """One line of the plan's table: groups of layers that are alike, the number of blocks that have them, and of experts in a
    block that do; 0 for layers that are in no expert."""

    part: str
    group: str
    linears: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    format: str
    blocks: int = 1
    experts: int = 0


@dataclass(frozen=True)
class Plan:
    """A plan: what a recipe will do to a model.

    Attributes:
        source: the model, from its headers.
        method: method of the decoder; `blocks`: the groups of layers in each of its blocks that get it.
        vision_method: method of the vision tower; `vision_groups`: the groups of layers that get it.
        layers: which layers are quantized and how, for the config block.
        rows: table of groups and their schemes, for people.
        bytes_before, bytes_after: bytes of all weights; exact.
        peak_bytes: peak memory of the run; an estimate.
        problems: reasons why the recipe cannot be carried out, a line each; empty when it can.
        statistics: statistics that the decoder is solved from instead of running it.
        budget: the budget that the recipe's `bits` leave; until it is shared out, sizes are the largest possible ones.
        allocation: how the budget was shared out, as the manifest keeps it.
        visual_tokens: what the recipe's reducer needs and does in the run; None without one.
    """

    recipe: Recipe
    source: Source
    method: QuantMethod
    blocks: list[list[Group]]
    vision_method: QuantMethod | None
    vision_groups: list[Group]
    layers: Layers
    rows: list[Row]
    linear_layers: int
    bytes_before: int
    bytes_after: int
    peak_bytes: int
    problems: list[str]
    statistics: Statistics | None = None
    budget: Budget | None = None
    allocation: dict | None = None
    visual_tokens: VisualTokens | None = None

    @property
    def undecided(self) -> bool:
        """Whether the widths of groups still depend on an allocation that has not been made."""
        return self.budget is not None and self.allocation is None

    @property
    def needs_data(self) -> bool:
        """Whether calibration samples are needed."""
        wanted = self.method.needs.statistics or self.recipe.kv_cache or self.recipe.bits
        return self.statistics is None and any(self.blocks) and bool(wanted)

    @property
    def reads_data(self) -> bool:
        """Whether calibration samples that are named are read: something is quantized, or the reducer learns from them."""
        return (
            any(self.blocks)
            or bool(self.recipe.vision_attention)
            or (self.recipe.resize is not None and not self.recipe.resize.settled)
            or (self.visual_tokens is not None and self.visual_tokens.learns)
        )

    @property
    def prefix(self) -> str | None:
        """The blocks behind which a block's input is observed: "float" or "quantized" ones; None: it is not observed."""
        if self.statistics:
            return "float"
        return "quantized" if self.needs_data or (self.recipe.calibrate.data and any(self.blocks)) else None

    def to_dict(self) -> dict:
        """The plan as JSON data."""
        return {
            "family": self.source.spec.family,
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
            "visual_tokens": self.visual_tokens.example if self.visual_tokens else None,
            "problems": self.problems,
        }


def build(recipe: Recipe, others: Others | None = None, source: Source | None = None) -> Plan:
    """Plan a recipe. Raises `UserError` for the first problem. Arguments as in `survey`."""
    plan = survey(recipe, others, source=source)
    if plan.problems:
        raise UserError(plan.problems[0])
    return plan


def survey(
    recipe: Recipe,
    others: Others | None = None,
    table: Mapping[str, QuantMethod] | None = None,
    source: Source | None = None,
) -> Plan:
    """Plan a recipe and list all of its problems. Raises `UserError` for an unusable model.

    Args:
        others: (block, group name) -> method of a group that does not get the recipe's scheme.
        table: widths by name, for a plan's `budget` with other widths than the recipe's.
        source: the recipe's model, if its headers have been read already.
    """
    source = _usable(recipe.model, source)
    if recipe.reduce:
        recipe = recipe.model_copy(update={"reduce": scorer_file.named(recipe.reduce)})
    before = sum(spec.nbytes for spec in source.stored.values())
    source = rotation.outlined(recipe, source)
    own = _own_others(recipe, source)
    exporter, method = recipe.exporter, QuantMethod(recipe.method, recipe.options, own | dict(others or {}))
    problems = _of_model(recipe, source, method, own)
    groups = [group for group in _decoder_groups(source, recipe, problems) if method.of(group).scheme]
    blocks: list[list[Group]] = [[] for _ in source.blocks]
    for group in groups:
        blocks[group.layer].append(group)
        if others or not recipe.bits:
            problems += fit.shape_problems(source, group, method.of(group).scheme, exporter, recipe.target)
    vision_method = _vision_method(recipe)
    vision_groups = _vision_groups(source, recipe, problems) if vision_method else []
    schemes = _schemes(method, groups) | (_schemes(vision_method, vision_groups) if vision_method else {})
    about = source.meta_model, source.written, source.spec
    layers = layers_of(schemes, *about, stored=source.stored, kv_cache=bool(recipe.kv_cache))
    problems += _unwritable(recipe, layers, blocks)
    kv_layers = len(models.attentions(source.meta_model, source.spec)) if recipe.kv_cache else 0
    written = sizes.output_tensors(source.stored, schemes, source.names, exporter, kv_layers)
    after = sum(spec.nbytes for spec in written.values())
    budget = None
    if (recipe.bits and not others) or table is not None:
        budget = _budget(recipe, problems, source, groups, written, table)
    any_of = replace(method, others={(-1, name): one for name, one in budget.widths.items()}) if budget else method
    stats = _statistics(recipe, any_of, blocks, problems)
    return Plan(
        recipe=recipe,
        source=source,
        method=method,
        blocks=blocks,
        vision_method=vision_method,
        vision_groups=vision_groups,
        layers=layers,
        rows=_rows(source, "decoder", groups, None if budget else schemes)
        + _rows(source, "vision", vision_groups, schemes),
        linear_layers=len(schemes),
        bytes_before=before,
        bytes_after=budget.largest if budget else after,
        peak_bytes=_peak(recipe, before, source, blocks, method, stats),
        problems=_once(problems),
        statistics=stats,
        budget=budget,
        visual_tokens=reducer.visual_tokens(recipe, example=not problems),
    )


def _usable(path: Path, source: Source | None) -> Source:
    """The model in a folder, in 16 bits and whole. Raises `UserError` for another one. `source`: the model, if it is open."""
    if source is None:
        models.refuse_quantized(path, models.read_config(path))  # its tensors have no place in the model as it was
        source = Source.of(path)
    if source.headers:
        models.check_files(source.path)
        models.check_shapes(source.path, source.meta_model, source.names)
    return source


def _of_model(recipe: Recipe, source: Source, method: QuantMethod, own: Others) -> list[str]:
    """Reasons why the recipe does not go with the model, whatever its layers' shapes."""
    found = [*rotation.problems(recipe, source), *reducer.problems(recipe, source)]
    found += [*attention.tower_problems(recipe, source), *_refusals(recipe, own)]
    needs, options = method.needs, cast(Any, method.options)
    routed = any(group.expert is not None for block in source.blocks for group in block)
    if "block_scales" in needs.searches and routed:
        found.append(
            f"objective '{options.objective}' runs llm-compressor's search, which cannot follow tokens to experts; "
            "use --set options.objective=gram"
        )
    if CROSS in needs.statistics and routed:
        found.append(
            f"scheme '{recipe.scheme}' compares tokens in the quantized and in the 16-bit model, which route them to different "
            "experts; use gptq"
        )
    if recipe.calibrate.fisher == "signs" and any(m.options.balance == "mbq" for m in (method, *own.values())):
        found.append("balance 'mbq' weighs by gradients of labels; leave out calibrate.fisher, or use balance auto")
    fault = models.draft_fault(source.spec, source.config, source.stored)
    return [*found, fault] if fault else found


def _own_others(recipe: Recipe, source: Source) -> dict[tuple[int, str], QuantMethod]:
    """The groups that the recipe's scheme itself gives to another scheme (`other` in `vlmcompress.quantizers`)."""
    other = getattr(recipe.method, "other", None)
    found: dict[tuple[int, str], QuantMethod] = {}
    if other is None:
        return found
    made: dict[str, QuantMethod] = {}
    for group in (group for block in source.blocks for group in block):
        chosen = other(group.name.rpartition(".")[2], group.layer, len(source.blocks), recipe.options)
        if chosen is not None:
            scheme, options = chosen
            if (key := repr(chosen)) not in made:
                module = SCHEMES.get(scheme)
                made[key] = QuantMethod(module, module.Options(**options))
            found[group.layer, group.name] = made[key]
    return found


def _refusals(recipe: Recipe, others: Others) -> list[str]:
    """Why the target does not run a scheme that some groups get instead of the recipe's; that one is checked already."""
    schemes = dict.fromkeys(method.scheme for method in others.values()) if recipe.target else ()
    return [reason for scheme in schemes for reason in targets.refusals(str(recipe.target), scheme)]


def _unwritable(recipe: Recipe, layers: Layers, blocks: list[list[Group]]) -> Iterator[str]:
    """Why no checkpoint can hold what the recipe asks for, or holds nothing of it.

    Args:
        layers: the quantized layers and their number formats.
        blocks: the groups that are quantized in each decoder block.
    """
    for scheme in layers.schemes:
        yield from fit.format_problems(scheme, recipe.exporter)
    yield from recipe.exporter.problems(layers)
    if recipe.kv_cache and not all(blocks):
        yield f"kv_cache needs a quantized layer in every decoder block; {blocks.index([])} has none"
    others = (recipe.reduce, recipe.resize, recipe.vision_attention, recipe.rotate)
    if not layers.quantized and not any(others):
        yield "the recipe quantizes nothing; choose another scheme or --vision, skip less, or add --reduce"


def _peak(
    recipe: Recipe,
    weights: int,
    source: Source,
    blocks: list[list[Group]],
    method: QuantMethod,
    stats: Statistics | None,
) -> int:
    runs = bool(method.needs.statistics or recipe.kv_cache or recipe.bits) and not stats
    return memory.peak_bytes(
        weights,
        [[source.shapes(group) for group in block] for block in blocks],
        source.config,
        samples=recipe.calibrate.samples if runs else 0,
        tokens=recipe.calibrate.max_length or memory.TOKENS,
        grams="gram" in stats.facts["needs"] if stats else None,
        streams=2 if CROSS in method.needs.statistics else 1,
    )


def _budget(recipe: Recipe, problems: list[str], *shapes: Any) -> Budget | None:
    """The budget that the recipe's `bits` leave; a budget that cannot be met is added to `problems`."""
    try:
        return budget_of(recipe, *shapes)
    except UserError as error:
        problems.append(str(error))
        return None


def _once(problems: list[str]) -> list[str]:
    """Keep one of several problems that differ only in the number of the block."""
    return list({re.sub(r"\.\d+\.", ".*.", problem): problem for problem in reversed(problems)}.values())[::-1]


def _skipped(recipe: Recipe, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in recipe.skip)


def _decoder_groups(source: Source, recipe: Recipe, problems: list[str]) -> list[Group]:
    """The decoder's groups without skipped layers. A group with a skipped layer cannot be smoothed any more."""
    groups = []
    for group in (group for block in source.blocks for group in block):
        kept = tuple(name for name in group.linears if not _skipped(recipe, name))
        if len(kept) == len(group.linears):
            groups.append(group)
        elif kept:
            groups.append(replace(group, linears=kept, smooth=None, kept=(), fused=group.fused and len(kept) > 1))
            if group.fused and group.expert is None:
                left = next(name for name in group.linears if name not in kept)
                problems.append(f"skip: {left} is left but not {kept[0]}, and engines fuse them; skip both or neither")
    for layer, block in enumerate(source.blocks):
        some = [name for group in block if group.expert is not None for name in group.linears]
        skipped = [name for name in some if _skipped(recipe, name)]
        if skipped and len(skipped) < len(some):
            problems.append(
                f"skip: {skipped[0]} is left but not all experts of block {layer}, and engines run them by one kernel; "
                f"skip 'layers.{layer}.{source.spec.experts}.' or none of them"
            )
    linears = models.linear_names(source.meta_model)
    for pattern in recipe.skip:
        if not any(re.search(pattern, name) for name in linears):
            problems.append(f"skip: '{pattern}' matches no linear layer; names look like {linears[-2]}")
    return groups


def _schemes(method: QuantMethod, groups: list[Group]) -> dict[str, Scheme]:
    """Map the linear layers of groups to their number formats."""
    return {name: scheme for group in groups for name in group.linears if (scheme := method.of(group).scheme)}


def _statistics(
    recipe: Recipe, method: QuantMethod, blocks: list[list[Group]], problems: list[str]
) -> Statistics | None:
    """Open the statistics that the recipe names; reasons against their use are added to `problems`."""
    if recipe.calibrate.stats is None:
        return None
    try:
        found = statistics_folder.read(Path(recipe.calibrate.stats))
    except UserError as error:
        problems.append(str(error))
        return None
    problems += reuse.problems(found, recipe, method, blocks)
    return found


def _vision_method(recipe: Recipe) -> QuantMethod | None:
    if recipe.vision == "bf16":
        return None
    module = SCHEMES.get(recipe.vision)
    return QuantMethod(module, module.Options())


def _vision_groups(source: Source, recipe: Recipe, problems: list[str]) -> list[Group]:
    """The vision tower's groups in which every layer's sides divide as kernels need it; an engine may fuse a group."""
    wanted = [
        group
        for group in models.vision_linears(source.meta_model, source.spec)
        if not any(_skipped(recipe, name) for name in group.linears)
    ]
    fits = [
        group for group in wanted if not any(side % VISION_MULTIPLE for shape in source.shapes(group) for side in shape)
    ]
    if not fits:
        why = f"with sides that are multiples of {VISION_MULTIPLE}" if wanted else "left to quantize"
        problems.append(f"the vision tower has no linear layer {why}; use --vision bf16")
    return fits


def _rows(source: Source, part: str, groups: list[Group], schemes: Mapping[str, Scheme] | None) -> list[Row]:
    """Rows of the plan's table, with like groups of several blocks in one row; `schemes` None: not allocated yet."""
    blocks: dict[Row, set[int]] = {}
    experts: dict[Row, set[int]] = {}
    for group in groups:
        linears = tuple(name.split(".")[-1] for name in group.linears)
        form = fit.label(schemes[group.linears[0]]) if schemes else "to be allocated"
        row = Row(part, group.kind, linears, tuple(source.shapes(group)), form)
        blocks.setdefault(row, set()).add(group.layer)
        experts.setdefault(row, set()).update(() if group.expert is None else {group.expert})
    return [replace(row, blocks=len(found), experts=len(experts[row])) for row, found in blocks.items()]
