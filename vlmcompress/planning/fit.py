"""Check that linear layers can have a scheme, in the files that are written and in the kernels of a target."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from vlmcompress import targets
from vlmcompress.errors import UserError
from vlmcompress.models import Group, Source
from vlmcompress.numerics import Scheme


def label(scheme: Scheme | None) -> str:
    """Name a scheme in a few characters, e.g. `w4a16 int g128 asym`."""
    if scheme is None:
        return "bf16"
    fmt, act = scheme.weights, scheme.activations
    if fmt.nvfp4:
        return f"w4a{act.bits if act else 16} nvfp4"
    kind = "fp8" if fmt.kind == "float" else "int"
    scales = {-1: "channel", 0: "tensor"}.get(fmt.group, f"g{fmt.group}")
    extra = ("" if fmt.symmetric else " asym") + (" static" if act and not act.dynamic else "")
    return f"w{fmt.bits}a{act.bits if act else 16} {kind} {scales}{extra}"


def format_problems(scheme: Scheme, exporter: ModuleType) -> list[str]:
    """Reasons why the exporter's format cannot hold the scheme; empty if it can."""
    try:
        exporter.storage(scheme)
    except UserError as error:
        return [str(error)]
    return []


def shape_problems(
    source: Source, group: Group, scheme: Scheme | None, exporter: ModuleType, target: str | None
) -> Iterator[str]:
    """Reasons why layers of a group cannot have the scheme, in the exporter's files or on the target; empty if they can."""
    if scheme is None:
        return
    size = scheme.weights.group
    sides = source.shapes(group)
    columns = sides[0][1]
    first = group.linears[0]
    if scheme.weights.nvfp4 and columns % size:
        skip = ", ".join(name.split(".")[-1] for name in group.linears)
        yield f"NVFP4 has a scale for each {size} inputs, which do not divide the {columns} of {first}; --set 'skip=[{skip}]'"
    elif size > 0 and columns % size:
        fit = next((other for other in (128, 64, 32) if other < size and columns % other == 0), None)
        instead = f"use --set options.group_size={fit or -1}{'' if fit else ' (one scale per row)'}"
        skip = ", ".join(name.split(".")[-1] for name in group.linears)
        yield f"group_size {size} does not divide in_features {columns} of {first}; {instead} or --set 'skip=[{skip}]'"
    else:
        for name, (rows, _) in zip(group.linears, sides, strict=True):
            try:
                exporter.shapes(scheme, rows, columns)
            except ValueError as error:
                yield f"{name}: {error}, or skip the layer"
            except UserError:
                return  # not about this shape; `format_problems` reports it
    machine = targets.get(target) if target else None
    if machine and group.expert is not None and (reason := machine.experts_refusal(scheme)):
        yield f"experts as {label(scheme)}: {reason}"
        return
    limit = machine.limits.get(targets.format_key(scheme).removesuffix("-static")) if machine else None
    if machine and limit and (problem := limit.problem(sum(rows for rows, _ in sides), columns, size)):
        yield f"{machine.title} does not run {first} as {label(scheme)}: {problem}; skip it or use another scheme"
