"""The YAML header of a model card, as the Hugging Face Hub reads it.

Keys and values are those of the Hub's model cards (https://huggingface.co/docs/hub/model-cards): `base_model` is a Hub id or
left out, never a folder of somebody's machine; `license: other` goes with `license_name` and `license_link`, so all three are
carried over from the original's card, and its languages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vlmcompress.common import yaml_files
from vlmcompress.errors import UserError

MAKER = "vlmcompress"
_CARRIED = ("license", "license_name", "license_link", "language")
_LONGEST = 1000  # characters of a value that is carried over


def header(metadata: Mapping[str, Any]) -> str:
    """The metadata between the lines that mark a card's header."""
    text = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True, width=10_000)
    return f"---\n{text}---"


def metadata(
    source: str,
    config: Mapping[str, Any],
    original: Mapping[str, Any],
    *,
    base_model: str | None = None,
    quantized_by: str | None = None,
) -> dict[str, Any]:
    """The metadata of a checkpoint.

    Args:
        source: the original's name in the manifest: a Hub id, or the name of a folder.
        config: the checkpoint's config.json.
        original: the metadata of the original's card.
        base_model: the original's Hub id; None: `source`, if that is one.
        quantized_by: who made it; None: this program.
    """
    quantization = config.get("quantization_config")
    origin = source.partition(":")[0]
    base = base_model or (origin if is_owned(origin) else None)
    found: dict[str, Any] = {"base_model": base} if base else {}
    if base and quantization:
        found["base_model_relation"] = "quantized"
    if quantization:
        found["quantized_by"] = quantized_by or MAKER
    found |= {"library_name": "transformers", "pipeline_tag": "image-text-to-text"}
    found |= {key: original[key] for key in _CARRIED if _usable(original.get(key))}
    return found | {"tags": _tags(config)}


def problem(name: str) -> str | None:
    """The reason why a name is no id of a repository, in huggingface_hub's words; None where it is one."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error).splitlines()[0].partition(": ")[0].rstrip(".")[:150]
    return None


def is_owned(name: str) -> bool:
    """Whether a name is an id with its owner, `org/name`."""
    return problem(name) is None and name.count("/") == 1


def front_matter(card: Path) -> dict[str, Any]:
    """The metadata of a model card; empty where it has none that can be read."""
    if not card.is_file():
        return {}
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    marks = [number for number, line in enumerate(lines) if line.strip() == "---"]
    if len(marks) < 2 or marks[0] != 0:
        return {}
    try:
        found = yaml_files.parse("\n".join(lines[1 : marks[1]]), str(card))
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def _tags(config: Mapping[str, Any]) -> list[str]:
    """Tags to search by: what made it, its format, its number formats, and whether visual tokens are reduced."""
    quantization = config.get("quantization_config") or {}
    tags = [MAKER, "vllm"]
    if method := quantization.get("quant_method", "compressed-tensors" if quantization else None):
        tags.append(str(method))
    groups = [group["weights"] for group in (quantization.get("config_groups") or {}).values() if group.get("weights")]
    found = [(args.get("type", "int"), args["num_bits"]) for args in groups]
    found += [("int", quantization["bits"])] if "bits" in quantization else []
    tags += [_number(kind, bits) for kind, bits in found]
    tags += ["visual-token-reduction"] if "vlmcompress" in config else []
    return list(dict.fromkeys(tags))


def _number(kind: str, bits: int) -> str:
    return f"{bits}-bit" if kind == "int" else "nvfp4" if bits == 4 else f"fp{bits}"


def _usable(value: Any) -> bool:
    """Whether a value of another card is a text, or a list of texts, of sane length."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(one, str) and 0 < len(one) <= _LONGEST for one in values)
