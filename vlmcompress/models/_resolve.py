"""Find a spec's linear groups in a real model (a skeleton on the meta device will do)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from vlmcompress.errors import UserError
from vlmcompress.models._spec import Group, LinearGroup, ModelSpec


def decoder_layers(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Full names of the decoder blocks, in order."""
    return _blocks(model, spec.layers)


def attentions(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Full names of the decoder's attention modules, in order: those that have a cache of keys and values."""
    paths = [f"{block}.self_attn" for block in decoder_layers(model, spec)]
    modules = dict(model.named_modules())
    return [path for path in paths if path in modules]


def layer_class(model: nn.Module, spec: ModelSpec) -> str:
    """Class name of the decoder blocks: what llm-compressor takes as `sequential_targets`."""
    return type(model.get_submodule(decoder_layers(model, spec)[0])).__name__


def resolve(model: nn.Module, spec: ModelSpec) -> list[Group]:
    """The linear groups of all decoder blocks, block by block, in the order in which a block runs them.

    A linear layer that no template names (a variant of the family) is a group of its own, without smoothing.
    """
    found: list[Group] = []
    for index, block in enumerate(decoder_layers(model, spec)):
        groups = _groups(model, block, index, spec.groups)
        seen = {name for group in groups for name in (*group.linears, *group.kept)}
        rest = [f"{block}.{name}" for name in _linears(model, block) if f"{block}.{name}" not in seen]
        found += groups + [Group(index, name.removeprefix(f"{block}."), (name,)) for name in rest]
    return found


def vision_linears(model: nn.Module, spec: ModelSpec) -> list[Group]:
    """The linear groups of the vision tower's blocks, as far as an engine can run them quantized.

    Patch embedding, merger and projector are not among them, nor is a layer that no template names.
    """
    return [
        group
        for index, block in enumerate(_blocks(model, spec.vision_layers))
        for group in _groups(model, block, index, spec.vision_groups)
    ]


def _blocks(model: nn.Module, path: str) -> list[str]:
    try:
        blocks = model.get_submodule(path)
    except AttributeError as error:
        raise UserError(
            f"{type(model).__name__} has no '{path}': this variant of the family is not supported"
        ) from error
    return [f"{path}.{name}" for name, _ in blocks.named_children()]


def decoder_blocks(model: nn.Module, spec: ModelSpec) -> list[list[Group]]:
    """The groups of linear layers of each decoder block, in order."""
    blocks: list[list[Group]] = [[] for _ in decoder_layers(model, spec)]
    for group in resolve(model, spec):
        blocks[group.layer].append(group)
    return blocks


def _groups(model: nn.Module, block: str, layer: int, templates: tuple[LinearGroup, ...]) -> list[Group]:
    """The groups of one block whose layers it has."""
    linears = _linears(model, block)
    modules = dict(model.get_submodule(block).named_modules())
    found: list[Group] = []
    for template, expert in _each(templates, linears):
        members = [name for name in template.linears if name in linears]
        if not members:
            continue
        smooth = next((name for name in template.smooth if name in modules), None)
        if smooth is not None and not _fits(modules[smooth], [linears[name] for name in members]):
            smooth = None
        found.append(
            Group(
                layer=layer,
                name=template.name,
                linears=tuple(f"{block}.{name}" for name in members),
                smooth=None if smooth is None else f"{block}.{smooth}",
                smooth_kind=template.smooth_kind,
                fused=template.fused and len(members) > 1,
                kept=tuple(f"{block}.{name}" for name in template.kept if name in modules),
                expert=expert,
            )
        )
    return found


def _each(templates: Sequence[LinearGroup], linears: Iterable[str]) -> Iterator[tuple[LinearGroup, int | None]]:
    """The templates of a block with those of experts once for each expert, beside its number."""
    names = list(linears)
    for numbered, some in itertools.groupby(templates, lambda template: "{}" in template.name):
        if not numbered:
            yield from ((template, None) for template in some)
            continue
        one = list(some)
        pattern = re.compile(re.escape(one[0].linears[0]).replace(r"\{\}", r"(\d+)"))
        numbers = sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name)))
        yield from ((_numbered(template, number), number) for number in numbers for template in one)


def _numbered(template: LinearGroup, number: int) -> LinearGroup:
    linears, smooth = (tuple(name.format(number) for name in part) for part in (template.linears, template.smooth))
    return replace(template, name=template.name.format(number), linears=linears, smooth=smooth)


def _linears(model: nn.Module, block: str) -> dict[str, nn.Linear]:
    """The linear layers of one block, by their name within it."""
    modules = model.get_submodule(block).named_modules()
    return {name: module for name, module in modules if isinstance(module, nn.Linear)}


def _fits(op: nn.Module, linears: list[nn.Linear]) -> bool:
    """Whether each output channel of `op` is one input channel of `linears`, so that `op` can take a scale in.

    It is not for v_proj and o_proj with grouped-query attention, where a value head feeds several query heads.
    """
    weight = getattr(op, "weight", None)
    return weight is not None and all(weight.shape[0] == linear.in_features for linear in linears)
