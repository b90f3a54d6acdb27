"""Check that linear layers can have a scheme, in the files that are written and in the kernels of a target."""

from __future__ import annotations

from collections.abc import Iterator

from vlmcompress.engines.vllm import partition
from vlmcompress.export.formats import ExportFormat
from vlmcompress.models import HEAD, PADDING, Group, Source
from vlmcompress.numerics import Scheme, label
from vlmcompress.recipe import targets
from vlmcompress.utils.errors import UserError


def shape_problems(
    source: Source, group: Group, scheme: Scheme | None, exporter: ExportFormat, target: str | None
) -> Iterator[str]:
    """Reasons why layers of a group cannot have the scheme, in the exporter's files or on the target; empty if they can."""
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
                yield f"{name}: {error}, or skip the layer"
            except UserError:
                return  # not about this shape; `checks.stored_format` reports it
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
        yield f"{machine.title} does not run {first} as {label(scheme)}: {problem}; skip it or use another scheme"
