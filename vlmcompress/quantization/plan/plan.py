"""A recipe on a model: what was read of the model, which layers get which scheme, and what stands against it.

`vlmcompress.quantization.plan.make_plan` makes a `Plan` from config.json and the weight files' headers; no weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from vlmcompress import models
from vlmcompress.engines.vllm import partition, served_model
from vlmcompress.export.convert import dequantized_outline
from vlmcompress.export.layer_targets import describe_layers
from vlmcompress.export.write import output_specs
from vlmcompress.models import Group, Source, stream
from vlmcompress.models.layer_names import Layers
from vlmcompress.numerics import Scheme, label, weight_only
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.plan.visual_tokens import VisualTokens, visual_tokens
from vlmcompress.recipe import Recipe, presets
from vlmcompress.recipe.allocation import Key
from vlmcompress.utils import model_folder
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Spec

VISION_MULTIPLE = 16  # divides both sides of a matrix in 8-bit kernels; tower layers with other sides stay as they are
RUNTIME_BYTES = 900_000_000  # Python, torch and transformers before a model is loaded
SAMPLE_TOKENS = 1024  # assumed tokens of a sample when the recipe does not limit them
TOKENS_PER_INPUT, LEAST_TOKENS = 32, 65_536
"""Tokens that layers are fitted to by default: so many for each input of the widest layer, and at least so many.

Error feedback is a regression on the other inputs: a layer of d inputs that is fitted to n tokens has about n / (n - d) times
the least error on other tokens, and those of demo-smol have (docs/results.md, "Tokens that layers are fitted to"). At 32 tokens
an input that is 1.03; fewer would save only the time of Gram matrices, as all tokens pass through the blocks. Below 65,536 it
is little."""


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
class Budget:
    """A budget of bytes and what it can be spent on.

    Attributes:
        widths: name of a width -> method.
        sizes: group, or all experts of a block together -> width -> bytes, for the widths that its shapes allow.
        weights: number of weights in all groups.
        fixed: bytes of everything else that is written.
        nbytes: the most bytes that all groups may take together.
    """

    widths: Mapping[str, QuantMethod]
    sizes: Mapping[Key, Mapping[str, int]]
    weights: int
    fixed: int
    nbytes: int

    @property
    def largest(self) -> int:
        """The most bytes that an allocation within the budget writes."""
        return self.fixed + min(self.nbytes, sum(max(nbytes.values()) for nbytes in self.sizes.values()))

    def bits(self, nbytes: int) -> float:
        """Bits per weight of groups that take `nbytes` together."""
        return 8 * nbytes / self.weights


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe will do to a model; what is not an attribute here is computed from these on first use.

    Attributes:
        recipe: the recipe, with the hash of the scorer that its reducer names.
        source: the model that is quantized, from its headers, in the type that it is written in; with an untied output head if
            that is rotated or quantized.
        bytes_before: bytes of all weights of the recipe's model.
        widths: (block, group name) -> method, for the groups whose width `allocate` chose within the budget of `bits`.
        allocation: the manifest's description of this choice; None: not chosen yet, or there is no budget.
        budget: the budget of the recipe's `bits` that `allocate` has yet to spend; None: there is none.
        problems: reasons why the recipe cannot be carried out, a line each; empty when it can.
    """

    recipe: Recipe
    source: Source
    bytes_before: int
    widths: Mapping[Key, QuantMethod] = field(default_factory=dict)
    allocation: dict[str, Any] | None = None
    budget: Budget | None = None
    problems: tuple[str, ...] = ()

    def with_source(self, source: Source) -> Plan:
        """The same recipe on a model derived from this one: dequantized, with an adapter merged, or rotated."""
        return replace(self, source=as_written(self.recipe, source))

    @cached_property
    def method(self) -> QuantMethod:
        """The method of the decoder and of the output head."""
        others = {**self.assigned, **self.widths}
        if self.head:
            others[self.head.layer, self.head.name] = _head_method(self.recipe, self.source)
        return QuantMethod(self.recipe.quantizer, self.recipe.options, others, self.recipe.exporter.SCALES)

    @cached_property
    def assigned(self) -> dict[Key, QuantMethod]:
        """(block, group name) -> method, for the groups that the recipe's scheme assigns another scheme (`other` in
        `Quantizer`)."""
        assigned: dict[Key, QuantMethod] = {}
        methods: dict[str, QuantMethod] = {}
        for group in (group for block in self.source.blocks for group in block):
            name = group.name.rpartition(".")[2]
            choice = self.recipe.quantizer.other(name, group.layer, len(self.source.blocks), self.recipe.options)
            if choice is not None:
                scheme, options = choice
                if repr(choice) not in methods:
                    methods[repr(choice)] = QuantMethod.named(scheme, **options)
                assigned[group.layer, group.name] = methods[repr(choice)]
        return assigned

    def skips(self, linear: str) -> bool:
        """Whether the recipe leaves a linear layer (memory name) in 16 bits."""
        return any(re.search(pattern, linear) for pattern in self.recipe.skip)

    def _unskipped(self, block: Sequence[Group]) -> Iterator[Group]:
        """A decoder block's groups without skipped layers. A group with a skipped layer is not smoothed."""
        for group in block:
            kept = tuple(linear for linear in group.linears if not self.skips(linear))
            if len(kept) == len(group.linears):
                yield group
            elif kept:
                # A scale in the norm would reach the skipped layer, too, which stays as it is.
                yield replace(group, linears=kept, smooth=None, kept=(), fused=group.fused and len(kept) > 1)

    @cached_property
    def blocks(self) -> list[list[Group]]:
        """For each block of the decoder, the groups of layers that are quantized."""
        return [
            [group for group in self._unskipped(block) if self.method.of(group).scheme] for block in self.source.blocks
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
        if self.recipe.vision == "bf16":
            return None
        grouped: dict[str, Any] = {"group_size": self.recipe.group_size} if self.recipe.vision == "w8a16" else {}
        return QuantMethod.named(self.recipe.vision, **grouped)

    @cached_property
    def vision_candidates(self) -> list[Group]:
        """The vision tower's groups to quantize, of any shape."""
        if self.recipe.vision == "bf16":
            return []
        towers = models.vision_linears(self.source.meta_model, self.source.spec)
        return [group for group in towers if not any(self.skips(linear) for linear in group.linears)]

    @cached_property
    def vision_groups(self) -> list[Group]:
        """The vision tower's groups of layers that are quantized: each as a whole, as an engine may fuse it."""
        scheme = self.vision_method.scheme if self.vision_method else None
        columns = max(1, scheme.weights.group) if scheme else 1
        return [
            group
            for group in self.vision_candidates
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
        embedding = _embedding_scheme(self.recipe, self.source)
        return schemes | ({models.embedding_name(self.source.meta_model): embedding} if embedding else {})

    @property
    def vocabulary(self) -> list[Group]:
        """The output head and the token embedding, where they are quantized."""
        embedding = Group(0, "embedding", (models.embedding_name(self.source.meta_model),))
        return [group for group in (self.head, embedding) if group and group.linears[0] in self.schemes]

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

    @cached_property
    def rows(self) -> list[Row]:
        """The table of groups and their schemes to print; equal groups of several blocks are one row."""
        parts = {"decoder": self.groups, "vision": self.vision_groups, "vocabulary": self.vocabulary}
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

            runtime + s t (6 h + pixels) + max(4 * (3 sum i^2 + 2 max i^2), 4 s t h e) + 12 * (weights of one block)

        that is activations in 16 bits between two blocks (and masks); float32 Gram matrices of three modalities with the
        solver's copies, or before these, in a search that re-runs blocks (`mbq`), inputs and outputs of a module, or of a
        token's `e` experts; and float32 copies of the block's weights. The source's weights are mapped from their files: the
        system keeps of them what fits.
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
        text = config.get("text_config") or config
        hidden = text.get("hidden_size") or 0
        tokens = calibrate.samples * (calibrate.max_length or SAMPLE_TOKENS)
        # Float32 pixels of a patch for each token that its merger leaves, in samples of which half is visual.
        vision = config.get("vision_config") or {}
        patch = vision.get("patch_size") or 14
        patch = patch[0] if isinstance(patch, list) else patch
        merge = (vision.get("spatial_merge_size") or 1) ** 2
        pixels = 3 * patch**2 * merge * (vision.get("temporal_patch_size") or 1) * 4 // 2
        experts = text.get("num_experts_per_tok") or text.get("top_k_experts") or 1
        searched = 4 * tokens * hidden * experts if self.method.needs.block_scales else 0
        return resident + max(4 * grams, searched) + tokens * (6 * hidden + pixels)

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
    def calibration_tokens(self) -> int:
        """How many of the samples' tokens layers are fitted to; 0: all."""
        if (chosen := self.recipe.calibrate.tokens) is not None:
            return chosen
        groups = [group for block in self.steps for group in block]
        methods = [self.method, *(self.method.of(group) for group in groups)]
        if (
            "absmax" in self.method.needs.statistics  # a share of the tokens would miss the largest values
            or any((method.options.balance or "off") != "off" for method in methods)  # may weigh a few tokens most
            or any(group.expert is not None for group in groups)  # each expert gets only some of the tokens
        ):
            return 0
        inputs = (shape[1] for group in groups for shape in self.source.shapes(group))
        return max(LEAST_TOKENS, TOKENS_PER_INPUT * max(inputs, default=0))

    @property
    def observes(self) -> bool:
        """Whether the inputs of blocks are observed, each after quantized blocks."""
        return self.needs_data or bool(self.recipe.calibrate.data and any(self.steps))

    @cached_property
    def fused_layers(self) -> list[partition.FusedLayer]:
        """The decoder's quantized layers as vLLM fuses them, those of equal shapes and formats once."""
        return partition.fused_layers(self.source.meta_model, self.groups, self.schemes)

    @property
    def device_counts(self) -> list[int]:
        """Numbers of devices, of those that launch files choose from, that the decoder's layers can be split among in vLLM."""
        decoder = served_model.describe(self.source.meta_model)
        whole = partition.device_counts(self.fused_layers)
        return [devices for devices in whole if served_model.tp_problem(decoder, devices) is None]

    def devices_problem(self, devices: int) -> str | None:
        """Why vLLM cannot share the model out among `devices` (tensor parallelism), and what to do; None where it can."""
        decoder = served_model.describe(self.source.meta_model)
        torn = served_model.tp_problem_message(decoder, devices) or partition.partition_problem(
            self.fused_layers, devices, self.recipe.target
        )
        if torn:
            return torn
        torn = partition.tower_problem(self.source.meta_model, self.source.spec, self.schemes, devices)
        return torn and f"{torn}; use fewer, or serve with --mm-encoder-tp-mode data, which gives each the whole tower"

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
            "prefix": "quantized" if self.observes else None,
            "allocation": self.allocation,
            "visual_tokens": self.visual_tokens.example if self.visual_tokens else None,
            "problems": [*self.problems],
        }


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


def read_source(recipe: Recipe) -> Source:
    """The recipe's model, from its headers; of an FP8 checkpoint the dequantized 16-bit model."""
    path = recipe.model
    if recipe.from_quantized:
        if recipe.rotate:
            raise UserError("rotate needs a 16-bit source; leave out from_quantized, or convert it with --format bf16")
        return dequantized_outline(path)
    models.spec_for(models.read_config(path, weights=False))  # check the family first, also without weights
    models.require_unquantized(path, models.read_config(path))  # its tensors don't fit into the unquantized model
    return Source.of(path)


def as_written(recipe: Recipe, source: Source) -> Source:
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


# vLLM 0.32 (`compressed_tensors.py: get_quant_method`) treats a head as a linear layer of any scheme. Embeddings may be
# integers without zero points and with 16-bit outputs, whose rows a Triton kernel looks up (`compressed_tensors_embedding.py`).
# A tied head would get the embedding's weights in place of its scheme's, so it is untied. MLX has kernels with zero points, and
# its tied head multiplies by the quantized embedding.


def _head_method(recipe: Recipe, source: Source) -> QuantMethod:
    """The method of an output head that is quantized. 4 bits are calibrated if the run has samples."""
    name, options = presets.resolve_scheme(recipe.head)
    if recipe.head == "w8a16":
        options = {"group_size": _group_size(source, recipe.group_size)}
    if recipe.head == "w4a16":
        options = _four_bits(recipe, source)
        calibrate, needs = recipe.calibrate, recipe.quantizer.needs(recipe.options)
        if needs.statistics or calibrate.data or recipe.kv_cache or recipe.bits:
            # An engine computes logits only at a prompt's last token and at the answer's. Visual tokens are most of a prompt
            # and never precede a generated token.
            options["balance"] = {"text": 1.0, "vision": 0.0, "answer": 1.0}
        else:
            name = "rtn"
    return QuantMethod.named(name, recipe.exporter.SCALES, **options)


def _embedding_scheme(recipe: Recipe, source: Source) -> Scheme | None:
    """The number formats of the token embedding; None: it is not quantized."""
    if recipe.embeddings == "bf16":
        return None
    return (
        weight_only(8, _group_size(source, recipe.group_size))
        if recipe.embeddings == "w8a16"
        else weight_only(4, **_four_bits(recipe, source))
    )


def _four_bits(recipe: Recipe, source: Source) -> dict[str, Any]:
    """Options of 4-bit weights of head and embedding, with zero points in MLX alone."""
    return {"group_size": _group_size(source, 128), "symmetric": recipe.format != "mlx"}


def _group_size(source: Source, most: int) -> int:
    """The largest size of groups, up to `most`, that kernels have and that divides the width of head and embedding; -1: a scale
    per row."""
    width = source.meta_model.get_parameter(f"{models.embedding_name(source.meta_model)}.weight").shape[1]
    return next((size for size in (128, 64, 32) if size <= most and width % size == 0), -1)
