"""What of a model stays in 16 bits, and what it is called: in memory (transformers), on disk and in vLLM.

Each format's config block names these parts in its own way (`vlmcompress.exporters`), and each reader compares the entries with
names of another kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from vlmcompress.common.layer_names import Kept, Names
from vlmcompress.models._spec import ModelSpec


def kept_modules(model: nn.Module, spec: ModelSpec, quantized: Collection[str], names: Mapping[str, str]) -> list[Kept]:
    """The largest parts of the model that hold linear layers, or routers, and no quantized one, and what each is called.

    Args:
        model: the model, or its skeleton.
        quantized: memory names of the layers that are quantized.
        names: memory name -> disk name, from `disk_names`.
    """
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers.update(routers(model, spec))
    quantized = set(quantized)
    above = _above(quantized)
    roots = {root for root in (*spec.vision, *spec.projector) if root not in above}
    found = []
    for path, is_leaf in _subtrees(model, layers, _above(layers), quantized, above, roots):
        forms = module_names(path, spec, names)
        # Qwen2-VL's decoder is `model` on disk, which is also what its tower lies under in memory.
        safe = forms if is_leaf else tuple(form for form in forms if form not in above)
        found.append(Kept(safe, not is_leaf))
        if is_leaf and keys_are_values(path, names):
            found.append(Kept(tuple(values_name(form) for form in safe), False))
    return found


def keys_are_values(path: str, names: Mapping[str, str]) -> bool:
    """Whether a layer is the `k_proj` of a block without `v_proj`, as Gemma 4 has some.

    vLLM loads such a layer twice, into keys and values of its `qkv_proj`, and wants to hear of both.
    """
    return path.endswith(".k_proj") and f"{values_name(path)}.weight" not in names


def values_name(name: str) -> str:
    """The name of the `v_proj` beside a `k_proj`."""
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
    """`(path, is it one linear layer)` of the largest subtrees that hold linear layers and no quantized one.

    Args:
        layers: linear layers and routers; `hold`: these and everything above them.
        quantized: those of them that are quantized; `above`: these and everything above them.
        roots: subtrees that count even without a linear layer: the engine may use one where transformers does not.
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
    """Memory names of what sends tokens to experts: engines run them as linear layers, and they stay in 16 bits."""
    if spec.router is None:
        return []
    found = [name for name, _ in model.named_modules() if name.endswith(f".{spec.router}")]
    return [name for name in found if not isinstance(model.get_submodule(name), nn.Linear)]


def _above(names: Collection[str]) -> set[str]:
    """Names, and those of everything that they are part of."""
    found = set[str]()
    for name in names:
        while name and name not in found:
            found.add(name)
            name = name.rpartition(".")[0]
    return found


def module_names(path: str, spec: ModelSpec, names: Mapping[str, str]) -> Names:
    """The names of the module `path`: in memory, on disk (one or, where its parts are renamed differently, more), in vLLM."""
    forms = [path]
    for memory, disk in names.items():
        suffix = memory.removeprefix(path)
        if suffix != memory and suffix.startswith(".") and disk.endswith(suffix):
            forms.append(disk.removesuffix(suffix))
    forms.append(spec.engine_name(path))
    return tuple(dict.fromkeys(forms))
