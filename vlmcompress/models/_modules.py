"""The modules of a model (or its meta model): which linear layers are quantized together, and what stays in 16 bits.

Each format lists the 16-bit parts in its own way (`vlmcompress.export.formats`), and readers compare the entries with
different names: in memory (transformers), on disk, or in vLLM.

One such part is an MTP head for speculative decoding: vLLM has a class for it, transformers drops it. It shares the model's
embedding and output head and stays in 16 bits; its tensors are copied byte for byte.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from vlmcompress.models._spec import Group, LinearGroup, ModelSpec, MtpHead
from vlmcompress.models.layer_names import Kept, Names
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import FLOATS, Spec


def decoder_layers(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Full names of the decoder blocks, in order."""
    return _blocks(model, spec.layers)


def attentions(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Full names of the decoder's attention modules, in order, that have a cache of keys and values."""
    paths = [f"{block}.self_attn" for block in decoder_layers(model, spec)]
    modules = dict(model.named_modules())
    return [path for path in paths if path in modules]


def resolve_groups(model: nn.Module, spec: ModelSpec) -> list[Group]:
    """The linear groups of all decoder blocks, block by block, in the order in which a block runs them.

    A linear layer without a template (in a variant of the family) forms its own group, without smoothing.
    """
    all_groups: list[Group] = []
    for index, block in enumerate(decoder_layers(model, spec)):
        groups = _groups(model, block, index, spec.groups)
        named = {name for group in groups for name in (*group.linears, *group.kept)}
        rest = [f"{block}.{name}" for name in _linears(model, block) if f"{block}.{name}" not in named]
        # A router decides which experts run, so rounding it changes more than its own error; it stays in 16 bits.
        rest = [name for name in rest if spec.router is None or not name.endswith(f".{spec.router}")]
        all_groups += groups + [Group(index, name.removeprefix(f"{block}."), (name,)) for name in rest]
    return all_groups


def vision_linears(model: nn.Module, spec: ModelSpec) -> list[Group]:
    """The linear groups of the vision tower's blocks that an engine can run quantized.

    Patch embedding, merger and projector are excluded, and so are layers without a template.
    """
    return [
        group
        for index, block in enumerate(_blocks(model, spec.vision_layers) if spec.vision_layers else ())
        for group in _groups(model, block, index, spec.vision_groups)
    ]


def tower_blocks(model: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    """The blocks of the vision tower; none where patches enter the decoder without one."""
    return list(model.get_submodule(spec.vision_layers).children()) if spec.vision_layers else []


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
    for group in resolve_groups(model, spec):
        blocks[group.layer].append(group)
    return blocks


def _groups(model: nn.Module, block: str, layer: int, templates: tuple[LinearGroup, ...]) -> list[Group]:
    """The groups of one block, without those whose layers it does not have."""
    linears = _linears(model, block)
    modules = dict(model.get_submodule(block).named_modules())
    groups: list[Group] = []
    for template, expert in _each(templates, linears):
        members = [name for name in template.linears if name in linears]
        if not members:
            continue
        # The first that the block has: families differ from variant to variant in where their norms are.
        smooth = next((name for name in template.smooth if name in modules), None)
        if smooth is not None and not _fits(modules[smooth], [linears[name] for name in members]):
            smooth = None
        groups.append(
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
    return groups


def _each(templates: Sequence[LinearGroup], linears: Iterable[str]) -> Iterator[tuple[LinearGroup, int | None]]:
    """Yield (template, expert): templates with `{}` once per expert, with its number filled in; others with None."""
    names = list(linears)
    # Templates of experts stand together, so that expert by expert all of one's groups come before the next one's.
    for numbered, some in itertools.groupby(templates, lambda template: "{}" in template.name):
        if not numbered:
            yield from ((template, None) for template in some)
            continue
        of_expert = list(some)
        pattern = re.compile(re.escape(of_expert[0].linears[0]).replace(r"\{\}", r"(\d+)"))
        numbers = sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))
        for number in numbers:
            for template in of_expert:
                parts = (template.linears, template.smooth)
                linears, smooth = (tuple(name.format(number) for name in part) for part in parts)
                named = replace(template, name=template.name.format(number), linears=linears, smooth=smooth)
                yield named, number


def _linears(model: nn.Module, block: str) -> dict[str, nn.Linear]:
    """The linear layers of one block, by their name within it."""
    modules = model.get_submodule(block).named_modules()
    return {name: module for name, module in modules if isinstance(module, nn.Linear)}


def _fits(op: nn.Module, linears: list[nn.Linear]) -> bool:
    """Whether each output channel of `op` is one input channel of `linears`, so that a scale can be folded into `op`.

    This is false for v_proj and o_proj with grouped-query attention, where a value head feeds several query heads.
    """
    weight = getattr(op, "weight", None)
    return weight is not None and all(weight.shape[0] == linear.in_features for linear in linears)


def kept_modules(model: nn.Module, spec: ModelSpec, quantized: Collection[str], names: Mapping[str, str]) -> list[Kept]:
    """The largest parts of the model with linear layers or routers, none of them quantized, and their names.

    Args:
        model: the model, or its meta model.
        quantized: memory names of the quantized layers.
        names: memory name -> disk name, from `disk_names`.
    """
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers.update(routers(model, spec))
    quantized = set(quantized)
    above = _above(quantized)
    # Tower and projector are listed even without a linear layer: the engine may have one where transformers has none.
    roots = {root for root in (*spec.vision, *spec.projector) if root not in above}
    kept = []
    for path, is_leaf in _subtrees(model, layers, _above(layers), quantized, above, roots):
        forms = module_names(path, spec, names)
        # Qwen2-VL's decoder is `model` on disk, and in memory its tower is below `model` too.
        safe = forms if is_leaf else tuple(form for form in forms if form not in above)
        kept.append(Kept(safe, not is_leaf))
        if is_leaf and keys_are_values(path, names):
            kept.append(Kept(tuple(values_name(form) for form in safe), False))
    return kept


def keys_are_values(path: str, names: Mapping[str, str]) -> bool:
    """Whether a layer is the `k_proj` of a block without `v_proj`, as Gemma 4 has some.

    vLLM loads such a layer twice, into keys and values of its `qkv_proj`, and looks for both names.
    """
    return path.endswith(".k_proj") and f"{values_name(path)}.weight" not in names


def values_name(name: str) -> str:
    """The name of the `v_proj` next to a `k_proj`."""
    return f"{name.removesuffix('k_proj')}v_proj"


def _subtrees(
    model: nn.Module,
    layers: set[str],
    hold: set[str],
    quantized: set[str],
    above: set[str],
    roots: set[str],
    path: str = "",
) -> Iterator[tuple[str, bool]]:
    """`(path, whether it is a single linear layer)` of the largest subtrees that hold linear layers but no quantized one.

    Args:
        layers: linear layers and routers; `hold`: these and all their parents.
        quantized: the quantized ones; `above`: these and all their parents.
        roots: subtrees that are included even without a linear layer, as the engine may use one where transformers does
            not.
    """
    for child, module in model.named_children():
        name = f"{path}.{child}" if path else child
        if name in layers:
            if name not in quantized:
                yield name, True
        elif name in roots:
            yield name, False
        elif name in above or any(root.startswith(name + ".") for root in roots):
            yield from _subtrees(module, layers, hold, quantized, above, roots, name)
        elif name in hold:
            yield name, False


def routers(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Memory names of the routers of mixtures, which engines run as linear layers; they stay in 16 bits."""
    if spec.router is None:
        return []
    paths = [name for name, _ in model.named_modules() if name.endswith(f".{spec.router}")]
    return [name for name in paths if not isinstance(model.get_submodule(name), nn.Linear)]


def _above(names: Collection[str]) -> set[str]:
    """The given names of modules and the names of all their parents."""
    parents = set[str]()
    for name in names:
        while name and name not in parents:
            parents.add(name)
            name = name.rpartition(".")[0]
    return parents


def module_names(path: str, spec: ModelSpec, names: Mapping[str, str]) -> Names:
    """The names of the module `path`: in memory, on disk (several if its parts are renamed differently), and in vLLM."""
    forms = [path]
    # The module has the names that remain where a parameter's name in memory and on disk end alike.
    for memory, disk in names.items():
        suffix = memory.removeprefix(path)
        if suffix != memory and suffix.startswith(".") and disk.endswith(suffix):
            forms.append(disk.removesuffix(suffix))
    forms.append(spec.engine_name(path))
    return tuple(dict.fromkeys(forms))


def mtp_roots(spec: ModelSpec, stored: Iterable[str]) -> list[str]:
    """The prefixes of the MTP head's tensors in `stored`: none, one, or one of each block that the head numbers on."""
    mtp = spec.mtp
    if mtp is None:
        return []
    if mtp.joint:
        shape = re.compile(rf"({re.escape(mtp.prefix)}\.\d+)\.{mtp.joint}\.weight")
        return [match[1] for name in stored if (match := shape.fullmatch(name))]
    return [mtp.prefix] if any(name.startswith(f"{mtp.prefix}.") for name in stored) else []


def mtp_tensors(spec: ModelSpec, stored: Collection[str]) -> list[str]:
    """The names in `stored` that belong to the MTP head."""
    roots = tuple(f"{root}." for root in mtp_roots(spec, stored))
    return [name for name in stored if name.startswith(roots)] if roots else []


def mtp_modules(spec: ModelSpec, stored: Mapping[str, Spec]) -> list[str]:
    """Names on disk of the MTP head's modules whose weight is a matrix."""
    names = [name for name in mtp_tensors(spec, stored) if name.endswith(".weight") and len(stored[name].shape) > 1]
    return [name.removesuffix(".weight") for name in names]


def mtp_blocks(spec: ModelSpec, config: Mapping[str, Any]) -> int:
    """Number of decoder blocks of the MTP head according to config.json; 0: there is no head."""
    value = _mtp_part(spec.mtp, config).get(spec.mtp.blocks) if spec.mtp else None
    return value if isinstance(value, int) and value > 0 else 0


def kept_mtp(spec: ModelSpec, stored: Iterable[str]) -> list[Kept]:
    """The MTP head as parts that stay in 16 bits; empty if the checkpoint has none."""
    if spec.mtp and spec.mtp.joint:
        old, new = spec.mtp.prefix, spec.mtp.engine
        return [Kept((root, new + root.removeprefix(old)), True) for root in mtp_roots(spec, stored)]
    return [Kept((root,), True, mtp=True) for root in mtp_roots(spec, stored)]


def mtp_problem(spec: ModelSpec, config: Mapping[str, Any], stored: Mapping[str, Spec]) -> str | None:
    """Why the MTP head cannot be copied: it does not match config.json, or is quantized. None if it can, or is missing."""
    names = mtp_tensors(spec, stored)
    if not spec.mtp or not names:
        return None
    key, said, roots = spec.mtp.blocks, mtp_blocks(spec, config), mtp_roots(spec, stored)
    numbered = {match[1] for name in names if (match := re.match(rf"{roots[0]}\.layers\.(\d+)\.", name))}
    blocks = len(roots if spec.mtp.joint else numbered)
    what = f"{len(names)} tensors are of a head that drafts tokens ({', '.join(f'{root}.*' for root in roots)})"
    if not said:
        part = "the top of it" if spec.mtp.top else "its text_config"
        return f'{what}, but config.json has no such head; add "{key}": {blocks} to {part}, or remove them'
    if blocks != said:
        return f"{what}, of {blocks} blocks, but config.json says {key} {said}; download the checkpoint again"
    if other := next((name for name in names if stored[name].dtype not in FLOATS), None):
        where = f"'{other}' is {stored[other].dtype}"
        return f"the head that drafts tokens is quantized ({where}), and is carried in 16 bits only; take the original"
    return None


def missing_mtp(spec: ModelSpec, config: Mapping[str, Any], stored: Collection[str]) -> str | None:
    """A message if config.json has an MTP head but the weight files do not; else None."""
    said = mtp_blocks(spec, config)
    if not said or not spec.mtp or mtp_tensors(spec, stored):
        return None
    return (
        f"config.json says {spec.mtp.blocks} {said}, but there is no tensor {spec.mtp.pattern}: the head that drafts "
        "tokens was lost when this checkpoint was saved; copy these tensors from the original to speculate with them"
    )


def mtp_warnings(spec: ModelSpec, config: Mapping[str, Any], stored: Collection[str]) -> list[str]:
    """The warning for a checkpoint made from one that lost its MTP head; empty for others."""
    lost = missing_mtp(spec, config, stored)
    return [f"{lost}; the config written here says 0"] if lost else []


def mtp_specs(spec: ModelSpec, config: Mapping[str, Any], meta_model: PreTrainedModel) -> dict[str, Spec]:
    """Name -> type and shape of the MTP head's tensors, from config.json alone: decoder blocks with attention, a matrix that
    joins hidden state and embedding, and three norms; embedding and output head where it has them for itself."""
    count, text = mtp_blocks(spec, config), meta_model.config.get_text_config()
    if not spec.mtp or not count:
        return {}
    blocks: Any = meta_model.get_submodule(spec.layers)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(blocks)
    block = blocks[kinds.index("full_attention") if "full_attention" in kinds else -1]
    inside = {name: Spec.of(value) for name, value in block.state_dict().items()}
    norm = Spec(next(iter(inside.values())).dtype, (text.hidden_size,))
    joint = Spec(norm.dtype, (text.hidden_size, 2 * text.hidden_size))
    if spec.mtp.joint:
        words = Spec(norm.dtype, (text.vocab_size, text.hidden_size))
        inside |= {f"{name}.weight": norm for name in ("enorm", "hnorm", "shared_head.norm")}
        inside |= {f"{name}.weight": words for name in ("embed_tokens", "shared_head.head")}
        inside[f"{spec.mtp.joint}.weight"] = joint
        return {
            f"{spec.mtp.prefix}.{len(blocks) + i}.{name}": value for i in range(count) for name, value in inside.items()
        }
    tensors = {f"layers.{i}.{name}": value for i in range(count) for name, value in inside.items()}
    tensors |= {f"{name}.weight": norm for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return {f"{spec.mtp.prefix}.{name}": value for name, value in (tensors | {"fc.weight": joint}).items()}


def without_missing_mtp(spec: ModelSpec, config: Mapping[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """config.json's content, with 0 MTP head blocks if the head's tensors are missing."""
    changed: Any = copy.deepcopy(dict(config))
    if spec.mtp and missing_mtp(spec, config, stored):
        _mtp_part(spec.mtp, changed)[spec.mtp.blocks] = 0
    return changed


def _mtp_part(mtp: MtpHead, config: Mapping[str, Any]) -> Any:
    """The part of config.json in which vLLM reads the MTP head's number of blocks."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and not mtp.top else config
