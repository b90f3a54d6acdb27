"""A recipe and its model, from config.json and the headers of the weight files: what is quantized, with which schemes.

A run makes one survey. `plan.problems` lists its problems; `plan.plan.Plan` extends it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, TypeVar

from vlmcompress import models
from vlmcompress.export import dequantized
from vlmcompress.export.layer_targets import describe_layers
from vlmcompress.export.write import output_specs
from vlmcompress.models import Group, Source, stream
from vlmcompress.models.layer_names import Layers
from vlmcompress.numerics import Scheme
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.plan import vocabulary
from vlmcompress.quantization.plan.budget import Budget, budget_of
from vlmcompress.recipe import Recipe
from vlmcompress.recipe.allocation import Key
from vlmcompress.reduction import scorer_file
from vlmcompress.utils import model_folder
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import SCHEMES
from vlmcompress.utils.tensor_headers import Spec

T = TypeVar("T")
VISION_MULTIPLE = 16  # divides both sides of a matrix in 8-bit kernels; tower layers with other sides stay as they are


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A recipe and its model; everything else is computed from these on first use.

    Attributes:
        recipe: the recipe, with the hash of the scorer that its reducer names.
        source: the model that is quantized, from its headers, in the type that it is written in; with an untied output head if
            that is rotated or quantized.
        bytes_before: bytes of all weights of the recipe's model.
        widths: (block, group name) -> method, for the groups whose width `allocate` chose within the budget of `bits`.
        allocation: the manifest's description of this choice; None: not chosen yet, or there is no budget.
    """

    recipe: Recipe
    source: Source
    bytes_before: int
    widths: Mapping[Key, QuantMethod] = field(default_factory=dict)
    allocation: dict[str, Any] | None = None

    @classmethod
    def of(cls, recipe: Recipe, source: Source | None = None) -> Self:
        """Make the survey of a recipe and its model.

        Args:
            source: the recipe's model, if its headers are read already.

        Raises:
            UserError: the model is quantized already, not whole, or of an unknown family.
        """
        source = source or _read(recipe)
        before, source = sum(spec.nbytes for spec in source.stored.values()), _as_written(recipe, source)
        if recipe.reduce:
            recipe = recipe.model_copy(update={"reduce": scorer_file.with_scorer_hash(recipe.reduce)})
        return cls(recipe=recipe, source=source, bytes_before=before)

    def with_source(self, source: Source) -> Self:
        """The same recipe on a model derived from this one: dequantized, with an adapter merged, or rotated."""
        return replace(self, source=_as_written(self.recipe, source))

    @cached_property
    def method(self) -> QuantMethod:
        """The method of the decoder and of the output head."""
        others = {**self.assigned, **self.widths}
        if self.head:
            others[self.head.layer, self.head.name] = vocabulary.head_method(self.recipe, self.source)
        return QuantMethod(self.recipe.method, self.recipe.options, others, self.recipe.exporter.SCALES)

    @cached_property
    def assigned(self) -> dict[Key, QuantMethod]:
        """(block, group name) -> method, for the groups that the recipe's scheme assigns another scheme (`other` in
        `Quantizer`)."""
        assigned: dict[Key, QuantMethod] = {}
        methods: dict[str, QuantMethod] = {}
        for group in (group for block in self.source.blocks for group in block):
            name = group.name.rpartition(".")[2]
            choice = self.recipe.method.other(name, group.layer, len(self.source.blocks), self.recipe.options)
            if choice is not None:
                scheme, options = choice
                if repr(choice) not in methods:
                    module = SCHEMES.get(scheme)
                    methods[repr(choice)] = QuantMethod(module, module.OPTIONS(**options))
                assigned[group.layer, group.name] = methods[repr(choice)]
        return assigned

    @cached_property
    def blocks(self) -> list[list[Group]]:
        """For each block of the decoder, the groups of layers that are quantized."""
        return [
            [group for group in _unskipped(self.recipe, block) if self.method.of(group).scheme]
            for block in self.source.blocks
        ]

    @property
    def groups(self) -> list[Group]:
        """The decoder's groups that are quantized."""
        return [group for block in self.blocks for group in block]

    @property
    def head(self) -> Group | None:
        """The output head, where it is quantized."""
        return models.head_group(self.source.spec, len(self.source.blocks)) if self.recipe.head != "bf16" else None

    @property
    def steps(self) -> list[list[Group]]:
        """The groups that a run quantizes, by step: those of each decoder block, then the output head, if it is quantized."""
        return [*self.blocks, [self.head]] if self.head else self.blocks

    @cached_property
    def vision_method(self) -> QuantMethod | None:
        """The method of the vision tower; None: it stays in 16 bits."""
        module = SCHEMES.get(self.recipe.vision) if self.recipe.vision != "bf16" else None
        grouped = {"group_size": self.recipe.group_size} if self.recipe.vision == "w8a16" else {}
        return QuantMethod(module, module.OPTIONS(**grouped)) if module else None

    @cached_property
    def vision_groups(self) -> list[Group]:
        """The vision tower's groups of layers that are quantized: each as a whole, as an engine may fuse it."""
        scheme = self.vision_method.scheme if self.vision_method else None
        columns = max(1, scheme.weights.group) if scheme else 1
        return [
            group
            for group in vision_candidates(self.recipe, self.source)
            # A group is left out whole, since an engine that fuses its layers has one format for all of them.
            if not any(side % VISION_MULTIPLE for shape in self.source.shapes(group) for side in shape)
            and not any(shape[1] % columns for shape in self.source.shapes(group))
        ]

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        """Quantized linear layer -> its number formats."""
        parts = [(self.method, self.groups), (self.method, [self.head] if self.head else [])]
        if self.vision_method:
            parts.insert(1, (self.vision_method, self.vision_groups))
        schemes = {
            linear: scheme
            for method, groups in parts
            for group in groups
            for linear in group.linears
            if (scheme := method.of(group).scheme)
        }
        embedding = vocabulary.embedding_scheme(self.recipe, self.source)
        return schemes | ({models.embedding_name(self.source.meta_model): embedding} if embedding else {})

    @cached_property
    def layers(self) -> Layers:
        """The quantized layers, as the written config describes them."""
        source = self.source
        return describe_layers(
            self.schemes,
            source.meta_model,
            source.written,
            source.spec,
            stored=source.stored,
            kv_cache=bool(self.recipe.kv_cache),
        )

    @cached_property
    def specs_written(self) -> dict[str, Spec]:
        """Type and shape of every tensor that is written."""
        source = self.source
        kv_layers = len(models.attentions(source.meta_model, source.spec)) if self.recipe.kv_cache else 0
        return output_specs(source.specs, self.schemes, source.names, self.recipe.exporter, kv_layers)

    @property
    def budget(self) -> Budget | None:
        """The budget of the recipe's `bits` that `allocate` has yet to spend; None: there is none."""
        return self._budget[0]

    @property
    def budget_problem(self) -> str | None:
        """Why the recipe's `bits` leave no budget."""
        return self._budget[1]

    @cached_property
    def _budget(self) -> tuple[Budget | None, str | None]:
        if self.recipe.bits is None or self.allocation is not None:
            return None, None
        return _or_problem(budget_of, self.recipe, self.source, self.groups, self.specs_written)


def rotation_problems(recipe: Recipe, source: Source) -> list[str]:
    """Reasons why the recipe's rotation would change the model's answers. `source`: rotated already, or not."""
    if recipe.rotate is None:
        return []
    if recipe.reduce is not None and recipe.reduce.reducer.by_channel:
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
    """Whether the recipe leaves a linear layer (memory name) in 16 bits."""
    return any(re.search(pattern, linear) for pattern in recipe.skip)


def vision_candidates(recipe: Recipe, source: Source) -> list[Group]:
    """The vision tower's groups to quantize, of any shape."""
    if recipe.vision == "bf16":
        return []
    return [
        group
        for group in models.vision_linears(source.meta_model, source.spec)
        if not any(skipped(recipe, linear) for linear in group.linears)
    ]


def _read(recipe: Recipe) -> Source:
    """The recipe's model, from its headers; of an FP8 checkpoint the dequantized 16-bit model."""
    path = recipe.model
    if recipe.from_quantized:
        if recipe.rotate:
            raise UserError("rotate needs a 16-bit source; leave out from_quantized, or convert it with --format bf16")
        return dequantized.outline(path)
    models.spec_for(models.read_config(path, weights=False))  # check the family first, also without weights
    models.require_unquantized(path, models.read_config(path))  # its tensors don't fit into the unquantized model
    return Source.of(path)


def _as_written(recipe: Recipe, source: Source) -> Source:
    """The source in the recipe's type, with an untied output head if that is rotated or quantized.

    Raises:
        UserError: its files are incomplete, or don't fit its config.
    """
    if source.headers:
        model_folder.companions(source.path)  # raises where one cannot be copied
        models.require_shapes(source.path, source.meta_model, source.names)
    source = source if source.choice == recipe.dtype else replace(source, choice=recipe.dtype)
    if recipe.head != "bf16" or (recipe.rotate is not None and not rotation_problems(recipe, source)):
        source = models.with_head(source)
    return source


def _or_problem(make: Callable[..., T], *args: Any) -> tuple[T | None, str | None]:
    """What `make(*args)` returns, or the text of its `UserError`."""
    try:
        return make(*args), None
    except UserError as error:
        return None, str(error)


def _unskipped(recipe: Recipe, block: Sequence[Group]) -> Iterator[Group]:
    """A decoder block's groups without skipped layers. A group with a skipped layer is not smoothed."""
    for group in block:
        kept = tuple(linear for linear in group.linears if not skipped(recipe, linear))
        if len(kept) == len(group.linears):
            yield group
        elif kept:
            # A scale in the norm would reach the skipped layer, too, which stays as it is.
            yield replace(group, linears=kept, smooth=None, kept=(), fused=group.fused and len(kept) > 1)
