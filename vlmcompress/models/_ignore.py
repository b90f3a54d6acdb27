"""The `ignore` list of a compressed-tensors config, right under all three namings.

transformers matches `ignore` against memory names, vLLM against its own names (it maps plain entries from hub names,
but leaves regular expressions alone), other readers against tensor names on disk. So every entry covers all three: a
plain name in each form for a single layer, one regular expression over the forms of its prefix for a whole subtree.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from vlmcompress.models._spec import ModelSpec


def ignore_patterns(
    model: nn.Module, spec: ModelSpec, quantized: Collection[str], names: Mapping[str, str]
) -> list[str]:
    """Entries that cover every linear layer outside `quantized` and none inside, in all three namings.

    Args:
        model: the model, or its skeleton.
        quantized: memory names of the layers that are quantized.
        names: memory name -> disk name, from `disk_names`.
    """
    entries: list[str] = []
    roots = [root for root in (*spec.vision, *spec.projector) if not _under(root, quantized)]
    for path, is_leaf in _subtrees(model, set(quantized), roots):
        forms = _forms(path, spec, names)
        if is_leaf:
            entries += forms
        else:
            # Qwen2-VL's decoder is `model` on disk, which is also what its tower lies under in memory.
            safe = [form for form in forms if not _under(form, quantized)]
            entries.append(f"re:(?:{'|'.join(re.escape(form) for form in safe)})\\..*")
    return list(dict.fromkeys(entries))


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


def _forms(path: str, spec: ModelSpec, names: Mapping[str, str]) -> list[str]:
    """The names of one module: in memory, on disk (one or, where its parts are renamed differently, more), in vLLM."""
    forms = [path]
    for memory, disk in names.items():
        suffix = memory.removeprefix(path)
        if suffix != memory and suffix.startswith(".") and disk.endswith(suffix):
            forms.append(disk.removesuffix(suffix))
    forms.append(spec.engine_name(path))
    return list(dict.fromkeys(forms))
