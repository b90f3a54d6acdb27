"""Every reason why a recipe cannot be carried out on a model: one list of checks, each a function of a `Survey`.

A check yields a line for each problem, which says what to do, too. To add one, write the function and put it into `CHECKS`,
in whose order users see them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec

from vlmcompress import models
from vlmcompress.export import adapter, formats, tokenizers
from vlmcompress.quantization.plan.shape_problems import shape_problems
from vlmcompress.quantization.plan.survey import (
    VISION_MULTIPLE,
    Survey,
    rotation_problems,
    skipped,
    vision_candidates,
)
from vlmcompress.quantization.plan.visual_tokens import reduction_problems as reducer_problems
from vlmcompress.recipe import targets

Check = Callable[[Survey], Iterable[str]]


def rotation(survey: Survey) -> Iterable[str]:
    """Whether the recipe's rotation leaves the model's answers as they are."""
    return rotation_problems(survey.recipe, survey.source)


def adapter_fits(survey: Survey) -> Iterator[str]:
    """Whether the recipe's adapter is of the model and can be merged, which a source in the work folder already has in it."""
    recipe, source = survey.recipe, survey.source
    if recipe.adapter and source.path == recipe.model and (reason := adapter.adapter_problem(recipe.adapter, source)):
        yield reason


def visual_tokens(survey: Survey) -> Iterable[str]:
    """Whether the recipe's reducer supports the model, and the engine serves both."""
    return reducer_problems(survey.recipe, survey.source)


def assigned_schemes(survey: Survey) -> Iterator[str]:
    """Whether the target runs the schemes that some groups get instead of the recipe's, which `resolve` has checked."""
    if survey.recipe.target:
        for scheme in dict.fromkeys(method.scheme for method in survey.assigned.values()):
            yield from targets.target_problems(survey.recipe.target, scheme)


def experts(survey: Survey) -> Iterator[str]:
    """Whether the scheme supports the experts of a mixture."""
    if all(group.expert is None for block in survey.source.blocks for group in block):
        return
    needs = survey.method.needs
    if "block_scales" in needs.searches:
        objective = getattr(survey.method.options, "objective", None)
        yield (
            f"objective '{objective}' runs llm-compressor's search, which cannot follow tokens to "
            "experts; use --set options.objective=gram"
        )


def published_search(survey: Survey) -> Iterator[str]:
    """Whether the package that runs MBQ's search as published is installed."""
    if "block_scales" in survey.method.needs.searches and find_spec("llmcompressor") is None:
        other = "" if survey.method.rounds_inputs else ", or use --set options.objective=gram"
        yield (
            f"scheme '{survey.recipe.scheme}' as published runs llm-compressor's search, which is not installed; "
            f"pip install '.[block-search]' in the checkout of vlmcompress{other}"
        )


def mtp_head(survey: Survey) -> Iterator[str]:
    """Whether the model's MTP head can be copied."""
    source = survey.source
    if problem := models.mtp_problem(source.spec, source.config, source.stored):
        yield problem


def skip(survey: Survey) -> Iterator[str]:
    """Whether the skipped layers exist, and none is a part of what an engine runs as one matrix or kernel."""
    recipe, source = survey.recipe, survey.source
    if not recipe.skip:
        return
    for group in (group for block in source.blocks for group in block):
        left = [linear for linear in group.linears if skipped(recipe, linear)]
        if left and len(left) < len(group.linears) and group.fused and group.expert is None:
            kept = next(linear for linear in group.linears if linear not in left)
            yield f"skip: {left[0]} is left but not {kept}, and engines fuse them; skip both or neither"
    for layer, block in enumerate(source.blocks):
        linears = [linear for group in block if group.expert is not None for linear in group.linears]
        left = [linear for linear in linears if skipped(recipe, linear)]
        if left and len(left) < len(linears):
            yield (
                f"skip: {left[0]} is left but not all experts of block {layer}, and engines run them by one kernel; "
                f"skip 'layers.{layer}.{source.spec.experts}.' or none of them"
            )
    names = models.linear_names(source.meta_model)
    for pattern in recipe.skip:
        if not any(re.search(pattern, name) for name in names):
            yield f"skip: '{pattern}' matches no linear layer; names look like {names[-2]}"


def shapes(survey: Survey) -> Iterator[str]:
    """Whether the scheme supports the layers' shapes; before an allocation `bits` checks them."""
    recipe = survey.recipe
    if recipe.bits and survey.allocation is None:
        return
    for group in survey.groups:
        scheme = survey.method.of(group).scheme
        yield from shape_problems(survey.source, group, scheme, recipe.exporter, recipe.target)


def vision_tower(survey: Survey) -> Iterator[str]:
    """Whether a vision tower that the recipe quantizes has a layer that can be."""
    if survey.vision_method and not survey.vision_groups:
        candidates = vision_candidates(survey.recipe, survey.source)
        why = f"with sides that are multiples of {VISION_MULTIPLE}" if candidates else "left to quantize"
        yield f"the vision tower has no linear layer {why}; use --vision bf16"


def stored_format(survey: Survey) -> Iterator[str]:
    """Whether the format of the files can hold the schemes."""
    exporter, source = survey.recipe.exporter, survey.source
    yield from formats.format_problems(exporter, survey.layers)
    config, reducer = source.meta_model.config.to_dict(), survey.recipe.reduce
    config = models.untied(config) if survey.head else config
    plain = reducer.plain() if reducer else None
    reasons = formats.files_problems(exporter, source.path, source.spec.family, config, plain, survey.recipe.mmproj)
    yield from reasons
    if not reasons and (problem := tokenizers.compare_tokenizers(exporter, source.path, config).problem):
        yield problem


def something_to_write(survey: Survey) -> Iterator[str]:
    """Whether the recipe changes anything, and quantizes in each block that stores scales of keys and values."""
    recipe = survey.recipe
    if recipe.kv_cache and not survey.source.spec.engine.kv_scales:
        yield f"kv_cache: vLLM's class of {survey.source.spec.family} reads no scales of keys and values; leave it out"
    if recipe.kv_cache and not all(survey.blocks):
        yield f"kv_cache needs a quantized layer in every decoder block; {survey.blocks.index([])} has none"
    if recipe.exporter.ENGINE:  # a conversion to another engine's format is a change
        return
    if not (survey.layers.quantized or recipe.reduce or recipe.resize or recipe.rotate or recipe.adapter):
        yield "the recipe quantizes nothing; choose another scheme or --vision, skip less, or add --reduce"


def bits(survey: Survey) -> Iterator[str]:
    """Whether the budget of the recipe's `bits` can be met."""
    if survey.budget_problem:
        yield survey.budget_problem


def matrices_of_the_vocabulary(survey: Survey) -> Iterator[str]:
    """Whether head and embedding can be quantized as in the recipe."""
    recipe, source = survey.recipe, survey.source
    quantized = [key for key in ("head", "embeddings") if getattr(recipe, key) != "bf16"]
    if quantized and source.spec.engine.head_shares and recipe.engine == "vllm":
        yield (
            f"{quantized[0]}: vLLM's class of {source.spec.family} gives the output head the embedding's weights, whatever the "
            "checkpoint has; leave it in bf16"
        )
    elif "embeddings" in quantized and source.spec.engine.embedding_whole and recipe.engine == "vllm":
        yield f"embeddings: vLLM's class of {source.spec.family} reads no quantized ones; leave them in bf16"
    elif quantized == ["embeddings"] and models.is_tied(source.meta_model, source.spec) and recipe.format != "mlx":
        yield "embeddings: the output head shares these weights, and reads no quantized ones; quantize it, too, by --head w4a16"
    for group in filter(None, [survey.head]):
        scheme = survey.method.of(group).scheme
        yield from shape_problems(source, group, scheme, recipe.exporter, recipe.target)


CHECKS: tuple[Check, ...] = (
    rotation,
    adapter_fits,
    visual_tokens,
    assigned_schemes,
    experts,
    published_search,
    mtp_head,
    skip,
    shapes,
    matrices_of_the_vocabulary,
    vision_tower,
    stored_format,
    something_to_write,
    bits,
)


def plan_problems(survey: Survey) -> list[str]:
    """Run all checks and list the problems; of lines that differ only in a block's number, the first."""
    lines = [line for check in CHECKS for line in check(survey)]
    return list({re.sub(r"\.\d+\.", ".*.", line): line for line in reversed(lines)}.values())[::-1]
