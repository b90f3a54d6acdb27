"""Name the linear layers of each config group, and check that every reader maps the names to the same layers.

A layer has up to three names: in memory (transformers), on disk, in the engine (vLLM). Transformers compares `targets`
and `ignore` with memory names; vLLM renames exact entries from disk to engine names but uses patterns unchanged. So
the target of the decoder's main scheme is the class `Linear`; that of a vision tower's scheme a pattern with the last part of
the tower's name (`visual`, `vision_tower`: the same in all three); that of a block's experts one pattern; that of output head
and token embedding one pattern of their three names, as neither is a `Linear` in vLLM (the embedding's class there is listed as
well); and that of any other layer its exact memory and disk names. Unquantized layers go into `ignore`, which every reader
checks before `targets`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn

from vlmcompress.export.formats import Reader
from vlmcompress.export.formats.compressed_tensors import group_of
from vlmcompress.models import ModelSpec, kept_modules, kept_mtp, keys_are_values, values_name
from vlmcompress.models.layer_names import EMBEDDING, LM_HEAD, Layers
from vlmcompress.numerics import Scheme

_ENGINE_EMBEDDING = "VocabParallelEmbedding"  # vLLM's class, see `targets`
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # vLLM's names


def describe_layers(
    schemes: Mapping[str, Scheme],
    model: nn.Module,
    disk: Mapping[str, str],
    spec: ModelSpec,
    *,
    stored: Iterable[str] = (),
    kv_cache: bool = False,
) -> Layers:
    """Describe a checkpoint's layers for a format's config block.

    Args:
        schemes: quantized linear layer (memory name) -> its scheme.
        model: the model, or its meta model.
        disk: memory name of a parameter -> its name in the written checkpoint.
        spec: the model's family.
        stored: names of all tensors of the checkpoint, to find those of an MTP head.
        kv_cache: whether there are scales of an FP8 KV cache.
    """
    quantized = {}
    for name, scheme in schemes.items():
        on_disk = disk[f"{name}.weight"].removesuffix(".weight")
        quantized[tuple(dict.fromkeys((name, on_disk, spec.engine_name(name))))] = scheme
    kept = [*kept_modules(model, spec, set(schemes), disk), *kept_mtp(spec, stored)]
    embeddings = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    alone = sum(not name.startswith(spec.vision) for name in embeddings) == 1
    return Layers(targets(schemes, disk, spec, alone), kept, quantized, kv_cache)


def targets(
    layers: Mapping[str, Scheme], disk: Mapping[str, str], spec: ModelSpec, alone: bool = True
) -> list[tuple[Scheme, list[str]]]:
    """List schemes with their targets, the decoder's main scheme last (readers warn about a target that another one shadows).

    A quantized embedding is also listed by its class in vLLM, as Llama (and so Mistral and GLM-4) gives it no name there
    (`models/llama.py` of 0.32).

    Args:
        layers: quantized linear layer (memory name) -> its scheme.
        disk: memory name of a parameter -> its name on disk.
        spec: the family, for the vision tower's path.
        alone: whether the decoder has no other embedding of that class.
    """
    towers: list[tuple[Scheme, str]] = []
    rest = dict(layers)
    for root in spec.vision:
        inside = {name: scheme for name, scheme in rest.items() if name.startswith(f"{root}.")}
        common = _most_common(inside)
        if common:
            members = [name.removeprefix(f"{root}.") for name, scheme in inside.items() if scheme == common]
            towers.append((common, _pattern(root.split(".")[-1], members)))
            rest = {name: scheme for name, scheme in rest.items() if name not in inside or scheme != common}
    outside = (*spec.vision, spec.lm_head)
    main = _most_common(
        {name: scheme for name, scheme in rest.items() if not name.startswith(outside) and not name.endswith(EMBEDDING)}
    )
    entries: dict[Scheme, list[str]] = {}
    for scheme, pattern in towers:
        entries.setdefault(scheme, []).append(pattern)
    for name, scheme in rest.items():
        if name.endswith((LM_HEAD, EMBEDDING)):  # in vLLM neither is a `Linear`
            forms = dict.fromkeys((name, disk[f"{name}.weight"].removesuffix(".weight"), spec.engine_name(name)))
            entries.setdefault(scheme, []).append(f"re:(?:{'|'.join(map(re.escape, forms))})$")
            if alone and name.endswith(EMBEDDING):
                entries[scheme].append(_ENGINE_EMBEDDING)
        elif scheme != main or name.startswith(spec.vision):
            exact = [name, disk[f"{name}.weight"].removesuffix(".weight")]
            exact += [values_name(alias) for alias in exact] if keys_are_values(name, disk) else []
            if spec.experts is not None and (mark := f".{spec.experts}.") in name:
                # All experts of a block have one scheme, and vLLM one kernel for them: one pattern.
                above = [alias.partition(mark)[0] for alias in (exact[0], exact[-1], spec.engine_name(name))]
                forms = dict.fromkeys(above)
                exact = [f"re:(?:{'|'.join(map(re.escape, forms))}){re.escape(mark)}\\d+\\..*"]
            entries.setdefault(scheme, []).extend(exact)
    if main:
        entries[main] = [*entries.pop(main, []), "Linear"]
    return [(scheme, list(dict.fromkeys(names))) for scheme, names in entries.items()]


def _pattern(stem: str, members: Iterable[str]) -> str:
    """One pattern for layers of a tower (names within it) in any block. It must not match embeddings, which transformers
    would quantize as well.

    Names of fused matrices (`qkv_proj`) are added: in vLLM 0.32, LLaVA-OneVision's class does not map them to their parts, and
    GLM-V's looks up its tower's `qkv` as `qkv_proj` in quantized checkpoints.
    """
    tails = dict.fromkeys(re.sub(r"^.*?\.\d+\.", "", name) for name in members)
    tails |= dict.fromkeys(f"{tail}_proj" for tail in tuple(tails) if tail.endswith(".qkv"))
    for fused, parts in _FUSED.items():
        for prefix in [tail.removesuffix(parts[0]) for tail in tails if tail.endswith(parts[0])]:
            if all(prefix + part in tails for part in parts):
                tails[prefix + fused] = None
    return f"re:(.*\\.)?{re.escape(stem)}\\.(.*\\.)?({'|'.join(map(re.escape, tails))})$"


def misread(
    config: Mapping, layers: Mapping[str, str | None], disk: Mapping[str, str], spec: ModelSpec
) -> list[tuple[str, str, str | None]]:
    """Find layers that a reader would map to another group, as (reader's name of the layer, group, group as read).

    Args:
        config: the `quantization_config` block.
        layers: every linear layer of the model (memory name) -> its config group; None: not quantized.
        disk: memory name of a parameter -> its name on disk. A tied output head may be missing.
        spec: the family, for vLLM's names.
    """
    stored = {name: disk.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight") for name in layers}
    in_engine = {alias: spec.engine_name(name) for name in layers for alias in (name, stored[name])}
    wrong = []
    # transformers uses memory names, tools use tensor names; vLLM uses its own, to which it renames only exact entries.
    for aliases, renamed in (({}, {}), (stored, {}), (in_engine, in_engine)):
        groups = {
            key: {"targets": [renamed.get(target, target) for target in group["targets"]]}
            for key, group in config["config_groups"].items()
        }
        as_read = {"config_groups": groups, "ignore": [renamed.get(entry, entry) for entry in config["ignore"]]}
        for name, expected in layers.items():
            alias = aliases.get(name, name)
            group = group_of(as_read, alias)
            if group != expected:
                wrong.append((alias, expected or "unquantized", group))
    return wrong


def misnamed(
    reader: Reader, config: Mapping, layers: Mapping[str, str | None], disk: Mapping[str, str], spec: ModelSpec
) -> list[tuple[str, str, str | None]]:
    """Find layers that an engine would wrongly take for quantized or unquantized, in a format without config groups.

    Arguments and result as for `misread`; `reader`: the format.
    """
    wrong: list[tuple[str, str, str | None]] = []
    for name, scheme in layers.items():
        stored = disk.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")
        for alias in dict.fromkeys((name, stored, spec.engine_name(name))):
            quantized = reader.quantizes(config, alias)
            if quantized is not None and quantized != (scheme is not None):
                wrong.append((alias, scheme or "unquantized", "quantized" if quantized else None))
    return wrong


def _most_common(layers: Mapping[str, Scheme]) -> Scheme | None:
    return Counter(layers.values()).most_common(1)[0][0] if layers else None
