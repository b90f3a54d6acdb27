"""A recipe next to its model, from config.json and the headers of the weight files: what would be quantized, how, from what.

The survey decides nothing: `plan.checks` says what is wrong with it, and `plan.plan` makes a plan of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vlmcompress import models
from vlmcompress.export import dequantized
from vlmcompress.export.layer_targets import describe_layers
from vlmcompress.export.write import output_specs
from vlmcompress.models import Group, Source, stream
from vlmcompress.models.layer_names import Layers
from vlmcompress.numerics import Scheme
from vlmcompress.quantization.calibration import statistics_folder
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.calibration.statistics_folder import Statistics
from vlmcompress.quantization.plan import vocabulary
from vlmcompress.quantization.plan.budget import Budget, budget_of
from vlmcompress.recipe import Recipe
from vlmcompress.recipe.allocation import Key
from vlmcompress.reduction import scorer_file
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import SCHEMES

T = TypeVar("T")
VISION_MULTIPLE = 16  # divides both sides of a matrix in 8-bit kernels; tower layers with other sides stay as they are


@dataclass(frozen=True)
class Allocation:
    """How the budget of a recipe's `bits` was shared out.

    Attributes:
        methods: (block, group name) -> method of the group.
        facts: the choice as the manifest describes it.
    """

    budget: Budget
    methods: Mapping[Key, QuantMethod]
    facts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A recipe, its model, and what the one would do to the other.

    Attributes:
        source: the model that is quantized, from its headers; where the recipe rotates it, the rotated one.
        method: method of the decoder; `assigned`: (block, group name) -> method of the groups that the recipe's scheme itself
            gives to another scheme.
        blocks: for each block of the decoder, the groups of layers that are quantized.
        head: the output head where it is quantized; its method is one of `method.others`.
        vision_method: method of the vision tower; `vision_groups`: the groups of layers that get it.
        schemes: quantized linear layer -> number formats; `layers`: the same for the config block.
        bytes_before, bytes_written: bytes of all weights, of the original and as written.
        budget: the budget that the recipe's `bits` leave; `budget_fault`: why it leaves none.
        allocation: how the budget was shared out, as the manifest has it; None: it was not yet, or there is none.
        statistics: statistics that the decoder is solved from instead of running it; `statistics_fault`: why it can't be.
    """

    recipe: Recipe
    source: Source
    method: QuantMethod
    assigned: Mapping[Key, QuantMethod]
    blocks: list[list[Group]]
    head: Group | None
    vision_method: QuantMethod | None
    vision_groups: list[Group]
    schemes: Mapping[str, Scheme]
    layers: Layers
    bytes_before: int
    bytes_written: int
    budget: Budget | None = None
    budget_fault: str | None = None
    allocation: dict[str, Any] | None = None
    statistics: Statistics | None = None
    statistics_fault: str | None = None

    @property
    def groups(self) -> list[Group]:
        """The decoder's groups that are quantized."""
        return [group for block in self.blocks for group in block]

    @property
    def steps(self) -> list[list[Group]]:
        """What a run quantizes one after the other: the decoder's blocks, and after them the output head."""
        return [*self.blocks, [self.head]] if self.head else self.blocks

    @property
    def undecided(self) -> bool:
        """Whether the widths of groups depend on an allocation that has not been made."""
        return self.budget is not None and self.allocation is None


def survey(recipe: Recipe, *, source: Source | None = None, allocation: Allocation | None = None) -> Survey:
    """Look at a recipe and its model.

    Args:
        source: the recipe's model, if its headers have been read already, or the rotated model.
        allocation: how the budget of the recipe's `bits` was shared out.

    Raises:
        UserError: the model is quantized already, not whole, or of an unknown family.
    """
    source = _whole(recipe, source)
    source = source if source.choice == recipe.dtype else replace(source, choice=recipe.dtype)
    if recipe.reduce:
        recipe = recipe.model_copy(update={"reduce": scorer_file.with_scorer_hash(recipe.reduce)})
    bytes_before = sum(spec.nbytes for spec in source.stored.values())
    # What is written has an output head of its own where that is rotated or quantized.
    if recipe.head != "bf16" or (recipe.rotate is not None and not rotation_problems(recipe, source)):
        source = models.with_head(source)
    assigned = _assigned(recipe, source)
    others = {**assigned, **(allocation.methods if allocation else {})}
    head, head_method = models.head_group(source.spec, len(source.blocks)), vocabulary.head_method(recipe, source)
    others |= {(head.layer, head.name): head_method} if head_method else {}
    method = QuantMethod(recipe.method, recipe.options, others, getattr(recipe.exporter, "SCALES", None))
    blocks = [[group for group in _unskipped(recipe, block) if method.of(group).scheme] for block in source.blocks]
    groups = [group for block in blocks for group in block]
    vision_module = SCHEMES.get(recipe.vision) if recipe.vision != "bf16" else None
    vision_method = QuantMethod(vision_module, vision_module.Options()) if vision_module else None
    vision_groups = [  # a group as a whole, as an engine may fuse it
        group
        for group in vision_candidates(recipe, source)
        if not any(side % VISION_MULTIPLE for shape in source.shapes(group) for side in shape)
    ]
    schemes = _schemes(method, groups) | (_schemes(vision_method, vision_groups) if vision_method else {})
    schemes |= _schemes(method, [head]) if head_method else {}
    if embedding := vocabulary.embedding_scheme(recipe, source):
        schemes[models.embedding_name(source.meta_model)] = embedding
    layers = describe_layers(
        schemes, source.meta_model, source.written, source.spec, stored=source.stored, kv_cache=bool(recipe.kv_cache)
    )
    kv_layers = len(models.attentions(source.meta_model, source.spec)) if recipe.kv_cache else 0
    written = output_specs(source.specs, schemes, source.names, recipe.exporter, kv_layers)
    budget, budget_fault = allocation.budget if allocation else None, None
    if recipe.bits and not allocation:
        budget, budget_fault = _or_fault(budget_of, recipe, source, groups, written)
    statistics, statistics_fault = None, None
    if recipe.calibrate.stats is not None:
        statistics, statistics_fault = _or_fault(statistics_folder.read_statistics, Path(recipe.calibrate.stats))
    return Survey(
        recipe=recipe,
        source=source,
        method=method,
        assigned=assigned,
        blocks=blocks,
        head=head if head_method else None,
        vision_method=vision_method,
        vision_groups=vision_groups,
        schemes=schemes,
        layers=layers,
        bytes_before=bytes_before,
        bytes_written=sum(spec.nbytes for spec in written.values()),
        budget=budget,
        budget_fault=budget_fault,
        allocation=allocation.facts if allocation else None,
        statistics=statistics,
        statistics_fault=statistics_fault,
    )


def rotation_problems(recipe: Recipe, source: Source) -> list[str]:
    """Reasons why the recipe's rotation would not leave the model's answers as they are. `source`: rotated already, or not."""
    if recipe.rotate is None:
        return []
    if recipe.reduce is not None and recipe.reduce.options.by_channel:
        return [
            f"reduce {recipe.reduce}: it ranks visual tokens by single channels, so that with --rotate it would keep "
            "others; take another, such as divprune, or leave out --rotate"
        ]
    try:
        stream(source.meta_model, source.spec, source.stored)
    except UserError as error:
        return [str(error)]
    return []


def skipped(recipe: Recipe, linear: str) -> bool:
    """Whether a linear layer, by its memory name, is one that the recipe leaves in 16 bits."""
    return any(re.search(pattern, linear) for pattern in recipe.skip)


def vision_candidates(recipe: Recipe, source: Source) -> list[Group]:
    """The vision tower's groups that the recipe wants quantized, whatever their shapes."""
    if recipe.vision == "bf16":
        return []
    return [
        group
        for group in models.vision_linears(source.meta_model, source.spec)
        if not any(skipped(recipe, linear) for linear in group.linears)
    ]


def _whole(recipe: Recipe, source: Source | None) -> Source:
    """The recipe's model, in 16 bits and whole; `source`: the model, if it is open. Raises `UserError` for another one."""
    path = recipe.model
    if source is None and recipe.from_quantized:
        if recipe.rotate:
            raise UserError("rotate needs a 16-bit source; leave out from_quantized, or convert it with --format bf16")
        return dequantized.outline(path)
    if source is None:
        models.spec_for(models.read_config(path, weights=False))  # the family first, whether there are weights or not
        models.refuse_quantized(path, models.read_config(path))  # its tensors have no place in the model as it was
        source = Source.of(path)
    if source.headers:
        models.check_files(source.path)
        models.check_shapes(source.path, source.meta_model, source.names)
    return source


def _or_fault(make: Callable[..., T], *args: Any) -> tuple[T | None, str | None]:
    """What `make(*args)` returns, or the text of its `UserError`."""
    try:
        return make(*args), None
    except UserError as error:
        return None, str(error)


def _assigned(recipe: Recipe, source: Source) -> dict[Key, QuantMethod]:
    """The groups that the recipe's scheme itself gives to another scheme (`other` in `vlmcompress.quantization.schemes`)."""
    other = getattr(recipe.method, "other", None)
    if other is None:
        return {}
    assigned: dict[Key, QuantMethod] = {}
    methods: dict[str, QuantMethod] = {}
    for group in (group for block in source.blocks for group in block):
        choice = other(group.name.rpartition(".")[2], group.layer, len(source.blocks), recipe.options)
        if choice is not None:
            scheme, options = choice
            if repr(choice) not in methods:
                module = SCHEMES.get(scheme)
                methods[repr(choice)] = QuantMethod(module, module.Options(**options))
            assigned[group.layer, group.name] = methods[repr(choice)]
    return assigned


def _unskipped(recipe: Recipe, block: Sequence[Group]) -> Iterator[Group]:
    """A decoder block's groups without skipped layers. A group with a skipped layer cannot be smoothed any more."""
    for group in block:
        kept = tuple(linear for linear in group.linears if not skipped(recipe, linear))
        if len(kept) == len(group.linears):
            yield group
        elif kept:
            yield replace(group, linears=kept, smooth=None, kept=(), fused=group.fused and len(kept) > 1)


def _schemes(method: QuantMethod, groups: Sequence[Group]) -> dict[str, Scheme]:
    """Map the linear layers of groups to their number formats."""
    return {linear: scheme for group in groups for linear in group.linears if (scheme := method.of(group).scheme)}
