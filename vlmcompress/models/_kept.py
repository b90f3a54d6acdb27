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
    """The largest parts of the model that hold linear layers and no quantized one, and what each is called.

    Args:
        model: the model, or its skeleton.
        quantized: memory names of the layers that are quantized.
        names: memory name -> disk name, from `disk_names`.
    """
    roots = [root for root in (*spec.vision, *spec.projector) if not _under(root, quantized)]
    found = []
    for path, is_leaf in _subtrees(model, set(quantized), roots):
        forms = module_names(path, spec, names)
        # Qwen2-VL's decoder is `model` on disk, which is also what its tower lies under in memory.
        safe = forms if is_leaf else tuple(form for form in forms if not _under(form, quantized))
        found.append(Kept(safe, not is_leaf))
    return found


def _subtrees(model: nn.Module, quantized: set[str], roots: list[str], path: str = "") -> Iterator[tuple[str, bool]]:
    """`(path, is it one linear layer)` of the largest subtrees that hold linear layers and no quantized one.

    `roots` are subtrees that count even without a linear layer: the engine may use one where transformers does not.
    """
    for child, module in model.named_children():
        name = f"{path}.{child}" if path else child
        if isinstance(module, nn.Linear):
            if name not in quantized:
                yield name, True
        elif name in roots:
            yield name, False
        elif _under(name, quantized) or any(root.startswith(name + ".") for root in roots):
            yield from _subtrees(module, quantized, roots, name)
        elif any(isinstance(inner, nn.Linear) for inner in module.modules()):
            yield name, False


def _under(path: str, names: Collection[str]) -> bool:
    return any(name == path or name.startswith(path + ".") for name in names)


def module_names(path: str, spec: ModelSpec, names: Mapping[str, str]) -> Names:
    """The names of the module `path`: in memory, on disk (one or, where its parts are renamed differently, more), in vLLM."""
    forms = [path]
    for memory, disk in names.items():
        suffix = memory.removeprefix(path)
        if suffix != memory and suffix.startswith(".") and disk.endswith(suffix):
            forms.append(disk.removesuffix(suffix))
    forms.append(spec.engine_name(path))
    return tuple(dict.fromkeys(forms))
