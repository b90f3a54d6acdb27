"""Every reason why a recipe cannot be carried out on a model: one list of checks, each a function of a `Plan`.

A check yields a line for each problem, which says what to do, too. To add one, write the function and put it into `CHECKS`,
in whose order users see them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from vlmcompress import models
from vlmcompress.engines.vllm import partition
from vlmcompress.export import adapter, formats, tokenizers
from vlmcompress.export.formats import ExportFormat
from vlmcompress.models import HEAD, PADDING, Group, Source
from vlmcompress.numerics import Scheme, label
from vlmcompress.quantization.plan.plan import VISION_MULTIPLE, Plan, rotation_problems
from vlmcompress.recipe import Recipe, targets
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import scorer_file, support
from vlmcompress.reduction.hooks import resizing
from vlmcompress.utils.errors import UserError

Check = Callable[[Plan], Iterable[str]]


def rotation(plan: Plan) -> Iterable[str]:
    """Whether the recipe's rotation leaves the model's answers as they are."""
    return rotation_problems(plan.recipe, plan.source)


def adapter_fits(plan: Plan) -> Iterator[str]:
    """Whether the recipe's adapter is of the model and can be merged, which a source in the work folder already has in it."""
    recipe, source = plan.recipe, plan.source
    if recipe.adapter and source.path == recipe.model:
        try:
            adapter.changes(recipe.adapter, source)
        except UserError as error:
            yield str(error)


def visual_tokens(plan: Plan) -> Iterable[str]:
    """Whether the recipe's reducer supports the model, and the engine serves both."""
    recipe, source = plan.recipe, plan.source
    try:
        before = reducer_block.read_reducer(source.config)
    except UserError as error:
        return [f"{source.path}: {error}"]
    reasons = _resize_problems(recipe, source)
    if recipe.reduce is None:
        if before is None:
            return reasons
        carried = scorer_file.carried(before.reducer, source.path)
        return [*reasons, f"the model carries the reducer {before.reducer}; add --reduce {carried}, or another"]
    try:
        support.require_reducer(source.vlm, recipe.reduce)
        scorer_file.load_scorer(source.vlm.model.config, recipe.reduce)
    except UserError as error:
        return [*reasons, f"reduce {recipe.reduce}: {error}"]
    if _runs_in_vllm(recipe):
        try:
            support.require_reducer(source.vlm, recipe.reduce, engine="vllm", files=False)
        except UserError as error:
            return [*reasons, f"reduce {recipe.reduce}: {error}; or --set engine=transformers"]
    return reasons


def assigned_schemes(plan: Plan) -> Iterator[str]:
    """Whether the target runs the schemes that some groups get instead of the recipe's, which `resolve` has checked."""
    if plan.recipe.target:
        for scheme in dict.fromkeys(method.scheme for method in plan.assigned.values()):
            yield from targets.target_problems(plan.recipe.target, scheme)


def mtp_head(plan: Plan) -> Iterator[str]:
    """Whether the model's MTP head can be copied."""
    source = plan.source
    if problem := models.mtp_problem(source.spec, source.config, source.stored):
        yield problem


def skip(plan: Plan) -> Iterator[str]:
    """Whether the skipped layers exist, and none is a part of what an engine runs as one matrix or kernel."""
    recipe, source = plan.recipe, plan.source
    if not recipe.skip:
        return
    for group in (group for block in source.blocks for group in block):
        left = [linear for linear in group.linears if plan.skips(linear)]
        if left and len(left) < len(group.linears) and group.fused and group.expert is None:
            kept = next(linear for linear in group.linears if linear not in left)
            yield f"skip: {left[0]} is left but not {kept}, and engines fuse them; skip both or neither"
    for layer, block in enumerate(source.blocks):
        linears = [linear for group in block if group.expert is not None for linear in group.linears]
        left = [linear for linear in linears if plan.skips(linear)]
        if left and len(left) < len(linears):
            yield (
                f"skip: {left[0]} is left but not all experts of block {layer}, and engines run them by one kernel; "
                f"skip 'layers.{layer}.{source.spec.experts}.' or none of them"
            )
    names = models.linear_names(source.meta_model)
    for pattern in recipe.skip:
        if not any(re.search(pattern, name) for name in names):
            yield f"skip: '{pattern}' matches no linear layer; names look like {names[-2]}"


def shapes(plan: Plan) -> Iterator[str]:
    """Whether the scheme supports the layers' shapes; before an allocation `bits` checks them."""
    recipe = plan.recipe
    if recipe.bits and plan.allocation is None:
        return
    for group in plan.groups:
        scheme = plan.method.of(group).scheme
        yield from shape_problems(plan.source, group, scheme, recipe.exporter, recipe.target)


def vision_tower(plan: Plan) -> Iterator[str]:
    """Whether a vision tower that the recipe quantizes has a layer that can be."""
    if plan.vision_method and not plan.vision_groups:
        candidates = plan.vision_candidates
        why = f"with sides that are multiples of {VISION_MULTIPLE}" if candidates else "left to quantize"
        yield f"the vision tower has no linear layer {why}; use --vision bf16"


def stored_format(plan: Plan) -> Iterator[str]:
    """Whether the format of the files can hold the schemes."""
    exporter, source = plan.recipe.exporter, plan.source
    yield from formats.format_problems(exporter, plan.layers)
    config, reducer = source.meta_model.config.to_dict(), plan.recipe.reduce
    config = models.untied(config) if plan.head else config
    plain = reducer.plain() if reducer else None
    reasons = formats.files_problems(exporter, source.path, source.spec.family, config, plain, plan.recipe.mmproj)
    yield from reasons
    if not reasons and (problem := tokenizers.compare_tokenizers(exporter, source.path, config).problem):
        yield problem


def something_to_write(plan: Plan) -> Iterator[str]:
    """Whether the recipe changes anything, and quantizes in each block that stores scales of keys and values."""
    recipe = plan.recipe
    # A conversion to another engine's format is a change, and `stored_format` refuses scales of keys and values.
    if recipe.exporter.ENGINE:
        return
    if recipe.kv_cache and not plan.source.spec.engine.kv_scales:
        yield f"kv_cache: vLLM's class of {plan.source.spec.family} reads no scales of keys and values; leave it out"
    if recipe.kv_cache and not all(plan.blocks):
        yield f"kv_cache needs a quantized layer in every decoder block; {plan.blocks.index([])} has none"
    if not (plan.layers.quantized or recipe.reduce or recipe.resize or recipe.rotate or recipe.adapter):
        yield "the recipe quantizes nothing; choose another scheme or --vision, skip less, or add --reduce"


def matrices_of_the_vocabulary(plan: Plan) -> Iterator[str]:
    """Whether head and embedding can be quantized as in the recipe."""
    recipe, source, in_vllm = plan.recipe, plan.source, _runs_in_vllm(plan.recipe)
    formats_of = {"head": recipe.head, "embeddings": recipe.embeddings}
    quantized = [key for key, name in formats_of.items() if name != "bf16"]
    if quantized and source.spec.engine.head_shares and in_vllm:
        yield (
            f"{quantized[0]}: vLLM's class of {source.spec.family} gives the output head the embedding's weights, whatever the "
            "checkpoint has; leave it in bf16"
        )
    elif "embeddings" in quantized and source.spec.engine.embedding_whole and in_vllm:
        yield f"embeddings: vLLM's class of {source.spec.family} reads no quantized ones; leave them in bf16"
    elif quantized == ["embeddings"] and models.is_tied(source.meta_model, source.spec) and recipe.format != "mlx":
        yield "embeddings: the output head shares these weights, and reads no quantized ones; quantize it, too, by --head w4a16"
    for group in plan.vocabulary:
        # Kernels' limits are of products, not of looking up rows.
        target = recipe.target if group.name == HEAD else None
        scheme = plan.schemes[group.linears[0]]
        yield from shape_problems(source, group, scheme, recipe.exporter, target, remedy="leave it in bf16")


CHECKS: tuple[Check, ...] = (
    rotation,
    adapter_fits,
    visual_tokens,
    assigned_schemes,
    mtp_head,
    skip,
    shapes,
    matrices_of_the_vocabulary,
    vision_tower,
    stored_format,
    something_to_write,
)


def plan_problems(plan: Plan) -> list[str]:
    """Run all checks and list the problems; of lines that differ only in a block's number, the first."""
    first: dict[str, str] = {}
    for line in (line for check in CHECKS for line in check(plan)):
        first.setdefault(re.sub(r"\bblock \d+|\.\d+\.", ".*.", line), line)
    return [*first.values()]


def shape_problems(
    source: Source,
    group: Group,
    scheme: Scheme | None,
    exporter: ExportFormat,
    target: str | None,
    remedy: str = "skip the layer",
) -> Iterator[str]:
    """Reasons why layers of a group cannot have the scheme, in the exporter's files or on the target; empty if they can.

    `remedy`: what to do about a shape that no group size helps.
    """
    if scheme is None:
        return
    group_size = scheme.weights.group
    shapes = source.shapes(group)
    columns = shapes[0][1]
    first = group.linears[0]
    skip = ", ".join(name.split(".")[-1] for name in group.linears)
    if scheme.weights.nvfp4 and columns % group_size:
        yield (
            f"NVFP4 has a scale for each {group_size} inputs, which do not divide the {columns} of {first}; "
            f"--set 'skip=[{skip}]'"
        )
    elif not partition.fits(partition.FusedLayer(group, tuple(shapes), scheme), 1):
        rows = scheme.weights.rows
        yield (
            f"vLLM runs {skip} as one matrix, and blocks of {rows} rows do not divide their outputs; use fp8, or --set "
            f"'skip=[{skip}]'"
        )
    elif group_size > 0 and scheme.weights.rows == 1 and columns % group_size:
        smaller = next((size for size in (128, 64, 32) if size < group_size and columns % size == 0), None)
        instead = f"use --set options.group_size={smaller or -1}{'' if smaller else ' (one scale per row)'}"
        yield (
            f"group_size {group_size} does not divide in_features {columns} of {first}; {instead} or --set 'skip=[{skip}]'"
        )
    else:
        for name, (rows, _) in zip(group.linears, shapes, strict=True):
            try:
                exporter.specs(scheme, rows, columns, "BF16")
            except ValueError as error:
                yield f"{name}: {error}{', or' if ';' in str(error) else ';'} {remedy}"
            except UserError:
                return  # not about this shape; `stored_format` reports it
    if target is None:
        return
    machine = targets.get_target(target)
    if group.expert is not None and (reason := machine.experts_problem(scheme)):
        yield f"experts as {label(scheme)}: {reason}"
        return
    outputs = sum(rows for rows, _ in shapes)
    outputs += -outputs % PADDING if group.name == HEAD else 0
    limit = machine.limits.get(targets.format_key(scheme).removesuffix("-static"))
    if limit and (problem := limit.problem(outputs, columns, group_size)):
        yield f"{machine.title} does not run {first} as {label(scheme)}: {problem}; {remedy} or use another scheme"


def _runs_in_vllm(recipe: Recipe) -> bool:
    """Whether the files have to run in vLLM: not those of a format that is another engine's."""
    return recipe.engine == "vllm" and not recipe.exporter.ENGINE


def _resize_problems(recipe: Recipe, source: Source) -> list[str]:
    """The reason why this model's images cannot be resized as in the recipe: a line at most."""
    resize = recipe.resize
    if resize is None:
        return []
    if reason := resizing.resize_problem(source.spec):
        return [f"{resize}: {reason}"]
    try:
        processor = models.load_processor(recipe.inputs_folder, recipe.trust_remote_code)
        every = resizing.image_settings(source.spec, processor)
        if len(every) == 1:
            return [f"{resize}: the processor of {recipe.model} has no setting of fewer tokens"]
        if resize.settled:
            resizing.choose_setting(source.spec, processor, resize)
    except UserError as error:
        return [str(error)]
    return []
