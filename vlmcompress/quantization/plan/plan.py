"""Plan what a recipe will do to a model, with every reason why it cannot, from config.json and the weight files' headers.

`make_plan` runs once in a run. `Survey.with_source` and `allocate` then replace the model by a derived one and set the widths,
without reading anything again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self

from vlmcompress.models import Group, Source, embedding_name
from vlmcompress.numerics import label
from vlmcompress.quantization.plan.problems import plan_problems
from vlmcompress.quantization.plan.survey import Survey
from vlmcompress.quantization.plan.visual_tokens import VisualTokens, visual_tokens
from vlmcompress.recipe import Recipe
from vlmcompress.utils.errors import UserError

RUNTIME_BYTES = 900_000_000  # Python, torch, transformers and llm-compressor before a model is loaded
SAMPLE_TOKENS = 1024  # assumed tokens of a sample when the recipe does not limit them


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


@dataclass(frozen=True, kw_only=True)
class Plan(Survey):
    """What a recipe will do to a model: a survey with its problems and with figures to print."""

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the recipe cannot be carried out, a line each; empty when it can."""
        return plan_problems(self)

    def require_no_problem(self) -> Self:
        """The plan, if it has no problem. Raises UserError."""
        if self.problems:
            raise UserError(self.problems[0])
        return self

    @cached_property
    def rows(self) -> list[Row]:
        """The table of groups and their schemes to print; equal groups of several blocks are one row."""
        embedding = Group(0, "embedding", (embedding_name(self.source.meta_model),))
        vocabulary = [group for group in (self.head, embedding) if group and group.linears[0] in self.schemes]
        parts = {"decoder": self.groups, "vision": self.vision_groups, "vocabulary": vocabulary}
        blocks: dict[Row, set[int]] = {}
        experts: dict[Row, set[int]] = {}
        for part, group in ((part, group) for part, groups in parts.items() for group in groups):
            linears = tuple(name.split(".")[-1] for name in group.linears)
            undecided = part == "decoder" and self.budget is not None
            number_format = "to be allocated" if undecided else label(self.schemes[group.linears[0]])
            row = Row(part, group.kind, linears, tuple(self.source.shapes(group)), number_format)
            blocks.setdefault(row, set()).add(group.layer)
            experts.setdefault(row, set()).update(() if group.expert is None else {group.expert})
        return [replace(row, blocks=len(layers), experts=len(experts[row])) for row, layers in blocks.items()]

    @property
    def bytes_after(self) -> int:
        """Bytes of all weights that are written; before an allocation the largest possible."""
        return self.budget.largest if self.budget else sum(spec.nbytes for spec in self.specs_written.values())

    @cached_property
    def peak_bytes(self) -> int:
        """Estimate of the peak memory of the run in bytes, from shapes alone.

        It is the sum of what a run holds at once, for s samples of t tokens, hidden size h, groups of i input features in a
        block:

            runtime + s t (6 h + pixels) + 4 * (3 sum i^2 + 2 max i^2) + 12 * (weights of one block)

        that is activations in 16 bits between two blocks (and masks), float32 Gram matrices of three modalities with the
        solver's copies, and float32 copies of the block's weights. The source's weights are mapped from their files: the system
        keeps of them what fits.
        """
        shapes = [[self.source.shapes(group) for group in block] for block in self.steps]
        block = max(
            (sum(rows * columns for group in groups for rows, columns in group) for groups in shapes), default=0
        )
        resident = RUNTIME_BYTES + 12 * block
        if not self._reads_inputs:
            return resident
        # A group's layers read one input, so it has one Gram matrix [in, in] of each of three modalities.
        squares = [[group[0][1] ** 2 for group in groups if group] for groups in shapes]
        grams = max((3 * sum(sides) + 2 * max(sides, default=0) for sides in squares), default=0)
        config, calibrate = self.source.config, self.recipe.calibrate
        hidden = (config.get("text_config") or config).get("hidden_size") or 0
        tokens = calibrate.samples * (calibrate.max_length or SAMPLE_TOKENS)
        # Float32 pixels of a patch for each token that its merger leaves, in samples of which half is visual.
        vision = config.get("vision_config") or {}
        patch = vision.get("patch_size") or 14
        patch = patch[0] if isinstance(patch, list) else patch
        merge = (vision.get("spatial_merge_size") or 1) ** 2
        pixels = 3 * patch**2 * merge * (vision.get("temporal_patch_size") or 1) * 4 // 2
        return resident + 4 * grams + tokens * (6 * hidden + pixels)

    @cached_property
    def visual_tokens(self) -> VisualTokens | None:
        """What the recipe's reducer needs and does in the run; None without one."""
        return visual_tokens(self.recipe, example=not self.problems)

    @property
    def linear_layers(self) -> int:
        """Number of quantized linear layers."""
        return len(self.schemes)

    @property
    def needs_data(self) -> bool:
        """Whether calibration samples are needed."""
        return any(self.steps) and self._reads_inputs

    @property
    def _reads_inputs(self) -> bool:
        """Whether the scheme, the KV cache or the budget depend on the inputs of layers."""
        return bool(self.method.needs.statistics or self.recipe.kv_cache or self.recipe.bits)

    @property
    def reads_data(self) -> bool:
        """Whether the recipe's calibration samples are read: something is quantized, or the reducer learns from them."""
        return (
            any(self.steps)
            or (self.recipe.resize is not None and not self.recipe.resize.settled)
            or (self.visual_tokens is not None and self.visual_tokens.learns)
        )

    @property
    def observed_after(self) -> str | None:
        """The blocks after which a block's input is observed, "quantized" ones; None: it is not observed."""
        return "quantized" if self.needs_data or (self.recipe.calibrate.data and any(self.steps)) else None

    def to_dict(self) -> dict[str, Any]:
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
            "prefix": self.observed_after,
            "allocation": self.allocation,
            "visual_tokens": self.visual_tokens.example if self.visual_tokens else None,
            "problems": self.problems,
        }


def make_plan(recipe: Recipe, *, source: Source | None = None, strict: bool = True) -> Plan:
    """Plan a recipe: survey it and its model, and run all checks.

    Args:
        source: as in `Survey.of`.
        strict: raise `UserError` for the first problem; False: the plan lists them.

    Raises:
        UserError: the model cannot be used, or the recipe not be carried out.
    """
    plan = Plan.of(recipe, source)
    return plan if plan.problems and not strict else plan.require_no_problem()
