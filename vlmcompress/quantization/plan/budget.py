"""The budget of bytes that a recipe's `bits` leave to split among groups of layers, from shapes alone.

A group gets a *width*: the recipe's scheme at some number of bits, or another scheme (`fp8`, `int8`, `bf16`).
Sizes are the exporter's, so a budget of 3.25 bits per weight counts scales and zero points, and a `max_size` everything
that is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from vlmcompress.models import Group, Source
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.plan.plan import Budget
from vlmcompress.quantization.plan.problems import shape_problems
from vlmcompress.recipe import Recipe, targets
from vlmcompress.recipe.allocation import RULES, Key
from vlmcompress.recipe.recipe import NAMED_WIDTHS, WIDTHS
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import SCHEMES
from vlmcompress.utils.tensor_headers import Spec
from vlmcompress.utils.text import parse_bytes, size


def widths(recipe: Recipe) -> dict[str, QuantMethod]:
    """The widths of a recipe. Raises `UserError` for one that the scheme does not have or the target does not run."""
    assert recipe.bits is not None
    target = targets.get_target(recipe.target) if recipe.target else None
    among: tuple[int | str, ...] = recipe.bits.among or WIDTHS
    if target and not recipe.bits.among:
        # Those that the target runs, and its 8-bit scheme where it runs no 8-bit weights with 16-bit activations.
        among = tuple(
            bits for bits in WIDTHS if not target.format_problem(targets.format_key(_method(recipe, bits).scheme))
        )
        wide = target.schemes["throughput"]
        among = among if 8 in among or wide not in NAMED_WIDTHS else (*among, wide)
    table = {str(width): _method(recipe, width) for width in among}
    for name, method in table.items():
        if target and (reason := target.format_problem(targets.format_key(method.scheme))):
            raise UserError(f"bits.among has {name}, and {reason}")
    return table


def _method(recipe: Recipe, width: int | str) -> QuantMethod:
    """The recipe's scheme at `width` bits, or the other scheme of that name. Raises `UserError` where there is no such."""
    options: Any = recipe.options
    if isinstance(width, int):
        if options.bits is None:
            schemes = ", ".join(name for name in SCHEMES.names() if SCHEMES.get(name).OPTIONS().bits is not None)
            raise UserError(f"bits: scheme '{recipe.scheme}' has one width only; take one of {schemes}")
        try:
            return QuantMethod(recipe.quantizer, dataclasses.replace(options, bits=width))
        except ValueError as error:
            raise UserError(f"bits.among has {width}, and scheme '{recipe.scheme}' has not: {error}") from error
    quantizer = SCHEMES.get("none" if width == "bf16" else width)
    defaults = quantizer.OPTIONS()
    if defaults.balance is not None and options.balance is not None:
        defaults = dataclasses.replace(defaults, balance=options.balance)
    return QuantMethod(quantizer, defaults)


def budget_of(
    recipe: Recipe,
    source: Source,
    groups: Sequence[Group],
    written: Mapping[str, Spec],
) -> Budget:
    """Compute the budget that a recipe's `bits` leave.

    Args:
        recipe: the recipe, with `bits`.
        source: the model, from its headers.
        groups: the decoder's groups of layers, without skipped layers.
        written: every tensor that would be written without an allocation, as `write.output_specs` names them.

    Raises:
        UserError: a width is not possible, or the budget cannot be met.
    """
    assert recipe.bits is not None
    if RULES[recipe.bits.by].reads_entropy and find_spec("sklearn") is None:
        raise UserError(
            f"bits.by {recipe.bits.by} needs scikit-learn; pip install '.[compress]' in the checkout of vlmcompress"
        )
    table = widths(recipe)
    if any(method.needs.block_scales for method in table.values()):
        raise UserError(
            "bits needs predicted errors, which searches that re-run blocks do not have; use gptq, awq or rtn"
        )
    exporter = recipe.exporter
    sizes: dict[Key, dict[str, int]] = {}
    for group in groups:
        weights = source.weights(group)
        problems = {
            name: list(shape_problems(source, group, method.scheme, exporter, recipe.target))
            for name, method in table.items()
        }
        nbytes: dict[str, int] = {}
        for name, method in table.items():
            if problems[name]:
                continue
            if method.scheme is None:  # 16 bits
                nbytes[name] = sum(weight.nbytes for weight in weights)
            else:  # the exporter's tensors: codes, scales and zero points
                layers = [exporter.specs(method.scheme, *weight.shape, weight.dtype) for weight in weights]
                nbytes[name] = sum(spec.nbytes for specs in layers for spec in specs.values())
        if not nbytes:
            raise UserError(next(iter(problems.values()))[0])
        before = sizes.get((group.layer, group.unit), dict.fromkeys(nbytes, 0))
        sizes[group.layer, group.unit] = {
            name: before[name] + count for name, count in nbytes.items() if name in before
        }
    parameters = {f"{linear}.weight" for group in groups for linear in group.linears}
    replaced = {name.removesuffix(".weight") for name in parameters} | {source.names[name] for name in parameters}
    fixed = sum(spec.nbytes for name, spec in written.items() if name.partition(":")[0] not in replaced)
    count = sum(math.prod(weight.shape) for group in groups for weight in source.weights(group))
    smallest, bits = sum(min(nbytes.values()) for nbytes in sizes.values()), recipe.bits
    if bits.max_size is not None:
        limit = parse_bytes(bits.max_size, "bits.max_size") - fixed
        least = f"{math.ceil((fixed + smallest) / 1000) / 1000:g}MB, of which {size(fixed)} are not shared out"
        setting = f"bits.max_size {bits.max_size}"
    else:
        assert bits.budget is not None
        limit = math.floor(bits.budget * count / 8)
        least = f"{math.ceil(1e4 * 8 * smallest / count) / 1e4:g} bits per weight, scales and zero points included"
        setting = f"bits.budget {bits.budget:g}"
    if smallest > limit:
        raise UserError(f"{setting} can't be met with widths {', '.join(table)}; the smallest reachable is {least}")
    return Budget(table, sizes, count, fixed, limit)
