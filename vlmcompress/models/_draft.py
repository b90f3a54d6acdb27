"""The head of a checkpoint that drafts tokens for speculative decoding: vLLM has a class for it, transformers drops it.

It shares the model's embedding and output head and stays in 16 bits. Its tensors are carried as they are, byte for byte.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from vlmcompress.common.layer_names import Kept
from vlmcompress.common.tensor_files import FLOATS, Spec
from vlmcompress.models._spec import ModelSpec


def draft_tensors(spec: ModelSpec, stored: Iterable[str]) -> list[str]:
    """Those of a checkpoint's tensor names that belong to the head."""
    return [name for name in stored if spec.draft and name.startswith(f"{spec.draft.prefix}.")]


def draft_modules(spec: ModelSpec, stored: Mapping[str, Spec]) -> list[str]:
    """Names on disk of the head's modules that have a matrix for a weight."""
    names = [name for name in draft_tensors(spec, stored) if name.endswith(".weight") and len(stored[name].shape) > 1]
    return [name.removesuffix(".weight") for name in names]


def draft_blocks(spec: ModelSpec, config: Mapping[str, Any]) -> int:
    """How many decoder blocks the head has by config.json; 0: there is none."""
    value = _text(config).get(spec.draft.blocks) if spec.draft else None
    return value if isinstance(value, int) and value > 0 else 0


def kept_draft(spec: ModelSpec, stored: Iterable[str]) -> list[Kept]:
    """The head as a part that stays in 16 bits; none where the checkpoint has no head."""
    return [Kept((spec.draft.prefix,), True, draft=True)] if spec.draft and draft_tensors(spec, stored) else []


def draft_fault(spec: ModelSpec, config: Mapping[str, Any], stored: Mapping[str, Spec]) -> str | None:
    """Why a checkpoint's head can't be carried: it is not what config.json says, or it is quantized. None: it can, or
    there is none (see `draft_lost`)."""
    names = draft_tensors(spec, stored)
    if not spec.draft or not names:
        return None
    key, prefix, said = spec.draft.blocks, spec.draft.prefix, draft_blocks(spec, config)
    found = len({match[1] for name in names if (match := re.match(rf"{prefix}\.layers\.(\d+)\.", name))})
    what = f"{len(names)} tensors are of a head that drafts tokens ({prefix}.*)"
    if not said:
        return f'{what}, but config.json has no such head; add "{key}": {found} to its text_config, or remove them'
    if found != said:
        return f"{what}, of {found} blocks, but config.json says {key} {said}; download the checkpoint again"
    if other := next((name for name in names if stored[name].dtype not in FLOATS), None):
        where = f"'{other}' is {stored[other].dtype}"
        return f"the head that drafts tokens is quantized ({where}), and is carried in 16 bits only; take the original"
    return None


def draft_lost(spec: ModelSpec, config: Mapping[str, Any], stored: Iterable[str]) -> str | None:
    """In words that config.json has a head that is not there; None where that is not so."""
    said = draft_blocks(spec, config)
    if not said or not spec.draft or draft_tensors(spec, stored):
        return None
    return (
        f"config.json says {spec.draft.blocks} {said}, but there is no tensor {spec.draft.prefix}.*: the head that drafts "
        "tokens was lost when this checkpoint was saved; copy these tensors from the original to speculate with them"
    )


def draft_dropped(spec: ModelSpec, config: Mapping[str, Any], stored: Iterable[str]) -> list[str]:
    """The warning about a checkpoint that is made of one whose head is lost; none where that is not so."""
    lost = draft_lost(spec, config, stored)
    return [f"{lost}; the config written here says 0"] if lost else []


def asked_draft(spec: ModelSpec, config: Mapping[str, Any], skeleton: PreTrainedModel) -> dict[str, Spec]:
    """The head's tensors that config.json asks for, where no weights are there: blocks like the decoder's with attention, a
    matrix that joins hidden state and embedding, three norms."""
    count, text = draft_blocks(spec, config), skeleton.config.get_text_config()
    if not spec.draft or not count:
        return {}
    blocks: Any = skeleton.get_submodule(spec.layers)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(blocks)
    block = blocks[kinds.index("full_attention") if "full_attention" in kinds else -1]
    found = {f"layers.{i}.{name}": Spec.of(value) for i in range(count) for name, value in block.state_dict().items()}
    norm = Spec(next(iter(found.values())).dtype, (text.hidden_size,))
    found |= {f"{name}.weight": norm for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    found["fc.weight"] = Spec(norm.dtype, (text.hidden_size, 2 * text.hidden_size))
    return {f"{spec.draft.prefix}.{name}": value for name, value in found.items()}


def found_draft(spec: ModelSpec, config: Mapping[str, Any], stored: Iterable[str]) -> dict[str, Any]:
    """The content of config.json with no more of a head than there is: 0 blocks where it is lost."""
    changed: Any = copy.deepcopy(dict(config))
    if spec.draft and draft_lost(spec, config, stored):
        _text(changed)[spec.draft.blocks] = 0
    return changed


def _text(config: Mapping[str, Any]) -> Any:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config
