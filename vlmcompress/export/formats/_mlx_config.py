"""What mlx-vlm reads of config.json: the names of transformers 4, as published checkpoints have them, and paths of modules.

Checkpoints that transformers 5 saved have other names (`rope_parameters`), of which mlx-vlm reads few: for what it misses it
takes a default, or it fails. The result has both; transformers reads either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vlmcompress.models import MlxClass, family_of
from vlmcompress.utils.errors import UserError

_PATHS = (
    ("model.language_model.", ("language_model.model.",)),
    ("model.text_model.", ("language_model.",)),
    ("model.visual.", ("vision_tower.",)),
    ("model.vision_tower.", ("vision_tower.", "vision_tower.vision_model.")),  # classes differ
    ("lm_head", ("language_model.lm_head",)),
    ("model.", ("",)),
)
"""Prefix of a memory name -> prefixes of the module's path in mlx-vlm, first match wins."""


def module_paths(name: str) -> list[str]:
    """The paths that a module (memory name) may have in mlx-vlm; entries of config.json under others are ignored."""
    old, new = next((old, new) for old, new in (*_PATHS, ("", ("",))) if name.startswith(old))
    return [prefix + name.removeprefix(old) for prefix in new]


def memory_name(path: str, names: Collection[str]) -> str:
    """The memory name of a tensor that MLX's tools wrote, of `names`, those in the model; the path itself if there is none."""
    inverse = [(new, old) for old, prefixes in _PATHS for new in prefixes if path.startswith(new)]
    candidates = [old + path.removeprefix(new) for new, old in sorted(inverse, key=lambda pair: -len(pair[0]))]
    return next((name for name in candidates if f"{name.rpartition('.')[0]}.weight" in names or name in names), path)


def published(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json with the names that mlx-vlm reads.

    Raises:
        UserError: mlx-vlm's class differs: in the decoder, in a head of its own, or in the order of kinds of layers.
    """
    if not isinstance(config.get("text_config"), Mapping):
        return dict(config)  # as published
    spec, decoder = family_of(config), config["text_config"].get("model_type")
    mlx = spec.engine.mlx if spec else MlxClass()
    if mlx.decoder not in ("", decoder):
        raise UserError(f"mlx-vlm's class has a decoder of the type {mlx.decoder}, not {decoder}")
    tied = config["text_config"].get("tie_word_embeddings", config.get("tie_word_embeddings", True))
    if tied and mlx.head == "own":
        raise UserError("mlx-vlm's class has an output head of its own, and the model's is tied to the embedding")
    if not tied and mlx.head == "tied":
        raise UserError("mlx-vlm's class ties the output head to the embedding; leave it so, and in bf16")
    text = {**_legacy(config["text_config"], mlx), **config["text_config"]}
    result = {**config, "text_config": text}
    if "mm_tokens_per_image" in config:  # Gemma 3
        text["mm_tokens_per_image"] = config["mm_tokens_per_image"]
        if "hidden_size" in text:  # images are scaled by the width at the top, 2048 where it is missing
            result["hidden_size"] = text["hidden_size"]
    if "image_start_token_id" in config:  # GLM-4V
        result = {"vision_start_token_id": config["image_start_token_id"], **result}
    if mlx.tower_type and isinstance(config.get("vision_config"), Mapping):
        result["vision_config"] = {**config["vision_config"], "model_type": config["model_type"]}
    if mlx.flat:
        result = {key: value for key, value in text.items() if key not in ("model_type", "dtype")} | result
    return result


def _legacy(text: Mapping[str, Any], mlx: MlxClass) -> dict[str, Any]:
    """Entries of a decoder's config under the names of transformers 4."""
    rope, entries = text.get("rope_parameters") or {}, dict[str, Any]()
    if "rope_theta" in rope:
        entries["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
        entries |= {key: scaling[key] for key in ("partial_rotary_factor",) if key in scaling}
        if rope.get("rope_type", "default") != "default" or "mrope_section" in rope:
            entries["rope_scaling"] = {"type": rope.get("rope_type", "default"), **scaling}
    elif mlx.full_attention and rope:
        whole, near = rope["full_attention"], rope["sliding_attention"]
        entries["rope_theta"] = entries["rope_global_base_freq"] = whole["rope_theta"]
        entries["rope_local_base_freq"] = near["rope_theta"]
        if whole.get("rope_type", "default") != "default":
            entries["rope_scaling"] = {key: value for key, value in whole.items() if key != "rope_theta"}
    layers = text.get("layer_types") or []
    if mlx.full_attention and layers:
        step = layers.index("full_attention") + 1 if "full_attention" in layers else len(layers) + 1
        if any((layer == "full_attention") != (i % step == 0) for i, layer in enumerate(layers, 1)):
            raise UserError(f"mlx-vlm takes each {step}th layer for full attention, and layer_types has another order")
        entries[mlx.full_attention] = step
    for override in (text.get("per_layer_config") or {}).values():  # Gemma 4: those with full attention
        entries |= {f"global_{key}": override[key] for key in ("head_dim",) if key in override}
        if "num_key_value_heads" in override:
            entries["num_global_key_value_heads"] = override["num_key_value_heads"]
    if "num_local_experts" in text:
        entries["num_experts"] = text["num_local_experts"]
    if "head_dim" not in text and "num_attention_heads" in text:
        entries["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    return entries
