"""Three namings of one tensor: in memory (transformers 5), on disk (hub or transformers' own), in the engine (vLLM).

Disk -> memory is transformers' own renaming, run on the checkpoint's names exactly as `from_pretrained` runs it, so it is
correct for hub names, for names saved by transformers 5, and for those of later releases.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from vlmcompress.models._requirements import OTHER_CONFIG
from vlmcompress.models._spec import ModelSpec
from vlmcompress.utils.errors import UserError

_QUANTIZED = frozenset(
    ("weight_packed", "weight_shape", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_zero_point")
    + ("weight_global_scale", "qweight", "qzeros", "scales", "biases", "g_idx", "absmax", "quant_map", "SCB")
)
COMPUTED = "embed_tokens.embed_scale"
"""Gemma's embedding scale, which transformers computes from config.json and does not store; but if the embedding is quantized,
compressed-tensors stores it."""
_WRAPPERS = {
    "module": "DataParallel, DistributedDataParallel and DeepSpeed",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "base_model.model": "PEFT",
}
"""Prefix that training libraries add to all names -> these libraries."""
_COMFY_UI = frozenset({"scale_weight", "scale_input", "scaled_fp8"})
_DECODER = re.compile(r"(model|transformer|language_model)\.(layers|h|blocks|embed_tokens|wte)\.")
_SEEING = re.compile("visi|visual|image|patch")
_TOWERS = ("model.visual.", "model.vision_tower.", "model.vision_model.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_NESTED, _NESTED_TOWER = re.compile(r"^model\.(language_model\.){2,}"), re.compile(r"^model\.language_model\.visual\.")


def disk_names(model: PreTrainedModel, disk_tensors: Iterable[str], unused: Collection[str] = ()) -> dict[str, str]:
    """Map the memory name of each parameter and buffer to its name in the checkpoint.

    Args:
        model: the model, or its meta model.
        disk_tensors: tensor names of the checkpoint.
        unused: those of them that are left out (`unused_tensors`).

    A tied tensor (lm_head sharing the embedding) that is not in the checkpoint has no entry. Raises `UserError` if a
    checkpoint tensor is not in the model, if two map to the same one, if a tensor is missing, or if transformers would merge
    or split tensors at load (so that they have no single name on disk).
    """
    state = model.state_dict(keep_vars=True)
    names: dict[str, str] = {}
    for disk, memory in memory_names(model, [name for name in disk_tensors if name not in unused]).items():
        if memory not in state:
            if _ignored(model, memory):
                continue
            where = f"in {type(model).__name__} (looked for '{memory}')"
            reason = _cause_by_name(disk) or _why_unplaced(model, memory)
            raise UserError(f"checkpoint tensor '{disk}' has no place {where}; {reason}")
        if memory in names:
            raise UserError(f"checkpoint tensors '{names[memory]}' and '{disk}' are both '{memory}'; remove one")
        names[memory] = disk
    missing = [name for name in state if not (name in names or name in tied_names(model) or name.endswith(COMPUTED))]
    if missing:
        raise UserError(_why_missing(model, missing, unused))
    return names


def unused_tensors(model: PreTrainedModel, disk_tensors: Iterable[str]) -> set[str]:
    """The tensors of a checkpoint that are of modules next to the model's, such as the value head of a reward model."""
    return {disk for disk, memory in memory_names(model, disk_tensors).items() if _is_unused(model, disk, memory)}


def _is_unused(model: PreTrainedModel, disk: str, memory: str) -> bool:
    """Whether a tensor is of a module at the top of the model, or of its core, that the model's class does not have."""
    owner: nn.Module = model
    first, _, rest = memory.partition(".")
    if first == model.base_model_prefix and hasattr(model, first):
        owner, first = getattr(model, first), rest.partition(".")[0]
    return not (hasattr(owner, first) or _ignored(model, memory) or _cause_by_name(disk))


def _cause_by_name(disk: str) -> str | None:
    """The reason, judged by its name, why a model has no such tensor, and what to do; None if the name tells none."""
    parts = disk.split(".")
    if parts[-1] in _COMFY_UI:
        return "it is of ComfyUI's scaled FP8, which vLLM and transformers do not read; give the 16-bit original"
    if parts[-1] in _QUANTIZED:
        return (
            "it is of a quantized layer, and config.json has no quantization_config of it; restore config.json, or give the "
            "16-bit original"
        )
    # PEFT renames a wrapped layer to `base_layer` and stores copies of whole modules under `modules_to_save`.
    if any(part.startswith(("lora_", "base_layer", "modules_to_save")) for part in parts):
        return "it is of a model with a PEFT adapter that is not merged; save the merged one (merge_and_unload)"
    for part, wrapper in _WRAPPERS.items():
        if f".{part}." in f".{disk}":
            return (
                f"'{part}.' is put into names by {wrapper}; save the model that it wraps, or take it out of all names"
            )
    return None


def _why_unplaced(model: PreTrainedModel, memory: str) -> str:
    """Why a part of the model has no tensor of this memory name, and what to do."""
    for match in re.finditer(r"\.(\d+)\.", memory):
        path = memory[: match.start()]
        blocks = dict(model.named_modules()).get(path)
        # A list of blocks that is shorter than the number in the name: config.json, not the tensor, is of another model.
        if isinstance(blocks, nn.ModuleList) and int(match[1]) >= len(blocks):
            return f"config.json says {len(blocks)} blocks in '{path}', and the weights have more; {OTHER_CONFIG}"
    return OTHER_CONFIG


def _why_missing(model: PreTrainedModel, missing: Sequence[str], unused: Collection[str]) -> str:
    """The message for a checkpoint without some of the model's tensors.

    Args:
        missing: memory names of these tensors.
        unused: names on disk of the tensors that the model does not have.
    """
    if unused:
        example = f"first '{min(unused)}'"
        # A decoder's tensors on one side and a tower's on the other: a language model with a vision model's config.json.
        blind = any(name.startswith(_TOWERS) for name in missing) and not any(map(_SEEING.search, unused))
        if blind and any(map(_DECODER.match, unused)):
            return (
                f"checkpoint holds a language model alone ({example}), and config.json is of {type(model).__name__}; give the "
                "whole vision-language model (llm-compressor quantizes language models)"
            )
        return (
            f"checkpoint lacks {len(missing)} tensors of {type(model).__name__}, first '{missing[0]}', and has {len(unused)} "
            f"others, {example}; {OTHER_CONFIG}"
        )
    # Only the head is missing: it was tied when the model was saved, and config.json no longer says so where it counts.
    if [name.rpartition(".")[0] for name in missing] == ["lm_head"]:
        where = ""
        if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
            where = "in text_config alone, where transformers does not look"
        tied = f"ties it to the embedding {where}" if where else "does not tie it to the embedding"
        return (
            f"checkpoint has no output head, and config.json {tied}; where both share their weights, write "
            '"tie_word_embeddings": true at the top of config.json'
        )
    prefix = next((prefix for prefix in _TOWERS if all(name.startswith(prefix) for name in missing)), None)
    if prefix and not any(name.startswith(prefix) and name not in missing for name in model.state_dict(keep_vars=True)):
        return (
            f"checkpoint has no vision tower (none of the {len(missing)} tensors {prefix}*): it is the language model alone, "
            "which is not quantized here (llm-compressor does that); to keep a model that sees, copy these tensors from the "
            "original"
        )
    return (
        f"checkpoint lacks {len(missing)} tensors of {type(model).__name__}, first '{missing[0]}'; it was not saved or "
        "downloaded whole, do so again"
    )


def flattened(name: str) -> str:
    """A tensor's name on disk, without the parts duplicated by transformers 5.3 to 5.5 and tools based on them.

    They saved Qwen3.5 as `model.language_model.language_model.language_model.*`, and its tower within the language model.
    """
    return _NESTED_TOWER.sub("model.visual.", _NESTED.sub("model.language_model.", name))


def memory_names(model: PreTrainedModel, disk_tensors: Iterable[str]) -> dict[str, str]:
    """Map the name of each checkpoint tensor to its memory name, whether or not the model has such a tensor.

    Tensors of quantized layers (`...down_proj.weight_packed`, `...weight_scale`) are renamed like the layer's `weight`.
    """
    state = model.state_dict(keep_vars=True)
    transforms = get_model_conversion_mapping(model)
    # transformers/conversion_mapping.py: renamings change names alone, converters also merge or split tensors.
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]

    def rename(disk: str) -> str:
        disk = flattened(disk)
        merging = [] if _EXPERT.search(disk) else converters  # separate experts also in memory
        memory, converter = rename_source_key(disk, renamings, merging, model.base_model_prefix, state)
        if converter is not None:
            raise UserError(f"tensor '{disk}' is merged or split with others at load ({converter}); not supported")
        return memory

    names = {}
    for disk in disk_tensors:
        names[disk] = rename(disk)
        module, _, leaf = disk.rpartition(".")
        # Renamings are patterns of `.weight` names; codes and scales of a layer go where its weight would.
        weight = rename(f"{module}.weight")
        if names[disk] not in state and weight in state:
            names[disk] = f"{weight.removesuffix('weight')}{leaf}"
    return names


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Map the memory name of each tied parameter to the parameter it shares, e.g. `lm_head.weight` to the embedding."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def unfound(names: Mapping[str, str], spec: ModelSpec, stored: Iterable[str] = ()) -> dict[str, str | None]:
    """Name on disk of a tensor that vLLM does not find -> its name on the hub, by which vLLM does; None: vLLM has none.

    Args:
        names: memory name of a tensor -> its name on disk.
        stored: names of all tensors on disk, also of those that the model does not have.
    """
    # vLLM maps a name on disk (`hf_to_vllm_mapper`); it finds the tensor if that is the name of the module that it built.
    lost = {memory: disk for memory, disk in names.items() if spec.engine_reads(disk) != spec.engine_name(memory)}
    return {disk: spec.hub_name(memory) for memory, disk in lost.items()} | dict.fromkeys(
        unwritten_names(names, stored)
    )


def unwritten_names(names: Mapping[str, str], stored: Iterable[str]) -> list[str]:
    """Stored tensors that are not written: `position_ids` of old transformers, which current readers do not accept."""
    placed = set(names.values())
    return [disk for disk in stored if disk.endswith(".position_ids") and disk not in placed]


def unfound_text(lost: Mapping[str, str | None]) -> str:
    """A message about the tensors of `unfound`: their number, and the first of them."""
    first, hub_name = min(lost.items())
    should = f"should be '{hub_name}'" if hub_name else "should not be there"
    return f"vLLM does not find {len(lost)} tensors by their names, first '{first}', which {should}"


def written_names(names: Mapping[str, str], spec: ModelSpec) -> dict[str, str]:
    """Memory name of each tensor -> its name in checkpoints made from this one.

    These are the names on disk if vLLM finds every tensor by them; otherwise those of the hub, which every reader knows.
    """
    return {memory: spec.hub_name(memory) for memory in names} if unfound(names, spec) else dict(names)


def linear_names(model: nn.Module) -> list[str]:
    """Memory names of all linear layers."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _ignored(model: PreTrainedModel, memory: str) -> bool:
    """Whether transformers deliberately ignores this tensor, such as rotary tables in old checkpoints."""
    patterns = {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"} | set(model._keys_to_ignore_on_load_unexpected or ())
    return any(re.search(pattern, memory) for pattern in patterns)
