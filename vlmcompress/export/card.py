"""Render a checkpoint's model card (README.md) from its manifest: contents, errors, and how to run it.

Its YAML header follows the Hub's model cards (https://huggingface.co/docs/hub/model-cards): `base_model` is a Hub id or left
out, never a local folder; `license: other` requires `license_name` and `license_link`, so all three are copied from the
original's card, as are its languages.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vlmcompress.export import launch, launch_files, manifest, readers
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.reduction import block as reducer_block
from vlmcompress.utils import json_files
from vlmcompress.utils.text import size, smaller

CARD = "README.md"
SOURCE_CARD = "README.source.md"  # the original model's card, unchanged
ON_DEMAND = (
    ' A request may set its own share, up to `keep_max`: `"mm_processor_kwargs": {"keep": 0.75}`. vLLM takes such arguments '
    "where it runs with `--trust-request-mm-kwargs`."
)
MAKER = "vlmcompress"
_FROM_ORIGINAL = ("license", "license_name", "license_link", "language")
_LONGEST = 1000  # characters of a value from the original's card


def render_card(record: Mapping[str, Any], tree: Path, name: str) -> str:
    """The text of README.md.

    Args:
        record: the manifest.
        tree: the checkpoint's folder, for its config.json and the original's model card.
        name: name of the checkpoint's final folder.
    """
    config = json_files.read(tree / "config.json")
    quantization = config.get("quantization_config")
    source = _plain(record["model"]["source"])
    front = front_matter(tree / SOURCE_CARD)
    licence = front.get("license_name") or front.get("license")
    facts = launch_files.launch_facts(config, record, name)
    about = metadata(record["model"]["source"], config, front, facts)
    before, after = record["size"]["weights_before"], record["size"]["weights_after"]
    sizes = f"Weights: {size(before)} before, {size(after)} after ({smaller(before, after)})."
    if before == after:
        sizes = f"Weights: {size(after)}, as they were."
    sections = [
        f"---\n{yaml.safe_dump(about, sort_keys=False, allow_unicode=True, width=10_000)}---",
        f"# {_plain(name)}\n\n{source} ({record['model']['family']}) compressed with vlmcompress. {sizes}",
        "## What is quantized\n\n" + (_schemes(quantization) if quantization else "Nothing."),
    ]
    if resize := record["recipe"].get("resize"):
        sections.append(
            f"## Image size\n\nThe processor makes large images smaller: to at most {resize['tokens']:,} visual tokens, in "
            "engines that follow it. No weight depends on it, and the original's processor undoes it."
        )
    if reducer := reducer_block.read_reducer(config):
        on_demand = reducer.reducer.takes_shares and record["recipe"].get("engine", "vllm") == "vllm"
        text = _reducer(reducer.reducer.label, record.get("visual_tokens"))
        sections.append("## Visual tokens\n\n" + text + ON_DEMAND * on_demand)
    sections.append("## Use\n\n" + _usage(name, facts))
    if record.get("errors"):
        text = f"{manifest.errors_text(record['errors'])} `vlmcompress report . --errors` lists them."
        sections.append("## Error of the layers\n\n" + text)
    sections.append("## How it was made\n\n" + _provenance(record))
    terms = f" ({_plain(licence)})." if isinstance(licence, str) and licence else "; see the original model."
    kept = f" The original's model card is `{SOURCE_CARD}`." if (tree / SOURCE_CARD).is_file() else ""
    sections.append(f"## Licence\n\nThe weights are derived from {source} and stay under its licence{terms}{kept}")
    return "\n\n".join(sections) + "\n"


def _plain(name: str) -> str:
    """A folder's name as one line without characters that Markdown or HTML interpret."""
    line = "".join(char if char.isprintable() else " " for char in name)
    return re.sub(r"([\\`*\[\]<>|&]|^[#>+-])", r"\\\1", line).strip() or "(no name)"


def _schemes(quantization: Mapping[str, Any]) -> str:
    if "config_groups" not in quantization:
        return f"Linear layers: {other_format(quantization)}. {_kept(quantization)}"
    rows = ["| layers | weights | activations | stored as |", "|---|---|---|---|"]
    for group in quantization["config_groups"].values():
        targets = ", ".join(f"`{target}`" for target in group["targets"]).replace("|", "\\|")
        formats = f"{number_format(group['weights'])} | {number_format(group['input_activations'])}"
        rows.append(f"| {targets} | {formats} | {group.get('format', quantization.get('quant_method'))} |")
    text = "\n".join(rows) + f"\n\n{_kept(quantization)}"
    if quantization.get("kv_cache_scheme"):
        text += " The KV cache is FP8 with calibrated scales."
    return text


def _kept(quantization: Mapping[str, Any]) -> str:
    """A sentence about the layers in 16 bits, from the list in the config block (compressed-tensors, ModelOpt, AWQ, GPTQ)."""
    dynamic = [pattern[2:] for pattern in quantization.get("dynamic") or () if pattern.startswith("-:")]
    entries = [*(quantization.get("ignore") or quantization.get("modules_to_not_convert") or ()), *dynamic]
    plain = (
        ["norms"]
        if readers.gather_facts({"quantization_config": quantization}, "").embeddings
        else ["embeddings", "norms"]
    )
    return f"Left as they were: {', '.join([*plain, *(f'`{entry}`' for entry in entries)])}."


def other_format(quantization: Mapping[str, Any]) -> str:
    """The number format in a block without config groups (AWQ, GPTQ, ModelOpt): `INT4 group 128, stored as awq`."""
    method = _plain(str(quantization.get("quant_method", "")))
    if "bits" not in quantization:
        return f"{_plain(str(quantization.get('quant_algo', 'as config.json says')))}, stored as {method}"
    size = quantization.get("group_size", -1)
    groups = f"group {size}" if isinstance(size, int) and size > 0 else "per channel"
    return f"INT{quantization['bits']} {groups}, stored as {method}"


def number_format(args: Mapping[str, Any] | None) -> str:
    """The text for `weights` or `input_activations` of a config group: `INT4 group 128, asymmetric`; `16 bit` for None."""
    if args is None:
        return "16 bit"
    kind = ("FP" if args["type"] == "float" else "INT") + str(args["num_bits"])
    group = f"group {args.get('group_size')}"
    scales = {"group": group, "tensor_group": group, "channel": "per channel", "tensor": "per tensor"}
    scales["block"] = "block {}x{}".format(*args.get("block_structure") or ("?", "?"))
    return (
        f"{kind} {scales.get(args['strategy'], 'per token')}"
        + ("" if args["symmetric"] else ", asymmetric")
        + (", dynamic" if args["dynamic"] else "")
    )


def _reducer(reducer: str, tokens: Mapping[str, Any] | None) -> str:
    """The section about the reducer: what it removes, and the config block that describes it."""
    text = f"This checkpoint carries the reducer `{reducer}`: fewer visual tokens reach the language model."
    if tokens and tokens["after"] is None:
        text += f" Of the {tokens['before']:,} of an image of {tokens['image']}, as many as its content asks for."
    elif tokens:
        text += f" Of an image of {tokens['image']}, {tokens['after']:,} of {tokens['before']:,}."
    text += " Tokens that are kept have their original positions, and no weight depends on it."
    return f"{text} The block `{reducer_block.KEY}` of config.json says what is reduced."


def _usage(name: str, facts: readers.LoadFacts) -> str:
    """The section about engines: the command or code, packages to install, and why other engines don't load the checkpoint."""
    name = name if name.isprintable() and "`" not in name else "FOLDER"
    folder = shlex.quote(f"./{name}")
    parts = []
    if facts.method == "mlx":
        ask = f'python -m mlx_vlm.generate --model {folder} --image photo.jpg --prompt "What is shown?"'
        if facts.reducer:
            ask = f"pip install vlmcompress  # mlx-vlm alone and LM Studio keep all visual tokens\nvlmcompress serve {folder}"
        parts = [f"```sh\npip install mlx-vlm\n{ask}\n```\n\nLM Studio loads the folder, too."]
    elif facts.method not in ("gguf", "openvino"):
        flags = " --trust-remote-code" * facts.code + " --kv-cache-dtype fp8" * facts.kv_fp8
        served = f"```sh\nvllm serve {folder} --served-model-name {facts.name}{flags}\n```"
        if reason := readers.engine_support("vllm", facts).reason:
            served = f"vLLM does not load it: {reason}."
        elif facts.reducer:
            plugin = "pip install vlmcompress where vLLM is; without its plugin vLLM refuses this checkpoint."
            served = f"{plugin}\n\n{served}"
        check = f"`vlmcompress doctor {folder}` checks that every file and tensor is as it was written."
        parts = [served, _transformers(name, facts), check]
    if commands := launch.commands(facts):
        rows = ["| engine | from this folder | checked |", "|---|---|---|"]
        rows += [f"| {title} | `{command}` | {checked} |" for title, command, checked in commands]
        where = f"Which engines cannot load it and why: `{launch_files.FOLDER}/README.md`."
        parts += ["\n".join(rows), where]
    return "\n\n".join(["From the folder that holds this one:"] * (facts.method not in ("gguf", "openvino")) + parts)


def _transformers(name: str, facts: readers.LoadFacts) -> str:
    """The code that loads the checkpoint in transformers, or the reason why that is impossible."""
    verdict, place = readers.engine_support("transformers", facts), json.dumps(f"./{name}", ensure_ascii=False)
    if verdict.reason:
        return f"transformers does not load it: {verdict.reason}."
    imports = ["from transformers import AutoModelForImageTextToText, AutoProcessor"]
    model = [f'model = AutoModelForImageTextToText.from_pretrained({place}, dtype="auto", device_map="auto")']
    needs = list(verdict.needs)
    if verdict.loader:
        imports = ["from transformers import AutoProcessor", "from vlmcompress.models import open_model"]
        why = "a quantized token embedding" if facts.embeddings else "experts one by one"
        model = [f'model, _ = open_model({place}, dtype="auto")  # transformers alone cannot load {why}']
    model.append(f"processor = AutoProcessor.from_pretrained({place})")
    if facts.reducer:
        imports.append("from vlmcompress.reduction.hooks import attach_carried")
        model.append(f"attach_carried(model, processor, {place})  # transformers alone would keep all visual tokens")
    needs += ["vlmcompress"] if verdict.loader or facts.reducer else []
    install = f"```sh\npip install {' '.join(map(shlex.quote, needs))}\n```\n\n" if needs else ""
    notes = "".join(f"\n\n{note[0].upper()}{note[1:]}." for note in verdict.notes)
    code = "\n".join([*imports, "", *model])
    return f"{install}```python\n{code}\n```{notes}"


def _provenance(record: Mapping[str, Any]) -> str:
    recipe, calibration = record["recipe"], record["calibration"]
    versions = ", ".join(f"{package} {version}" for package, version in record["created_by"].items())
    changed = record.get("converted")
    if changed and recipe.get("scheme") == "converted":
        origin = f"Another tool's {_plain(changed['from'])} checkpoint, brought into the format {_plain(changed['to'])}"
        return f"{origin} without rounding anything again. {versions}.\n\nThe hash of every file: `{MANIFEST}`."
    text = f"Scheme `{recipe.get('scheme')}`, seed {record['seed']}. {versions}."
    if changed:
        text += f" Written as {_plain(changed['from'])} first, then as {_plain(changed['to'])}, with the same weights."
    if calibration is None:
        text += "\n\nNo calibration data: each weight was rounded on its own."
    else:
        kept = {key: value for key, value in calibration.items() if key != "image_hashes"}
        facts = "\n".join(f"| {key} | {_value(value)} |" for key, value in kept.items())
        text += f"\n\nCalibration data:\n\n| | |\n|---|---|\n{facts}"
    return text + f"\n\nThe whole recipe and the hash of every file: `{MANIFEST}`."


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_value(item)}" for key, item in value.items())
    return f"{value:.3g}" if isinstance(value, float) else _plain(str(value))


def metadata(
    source: str, config: Mapping[str, Any], original: Mapping[str, Any], facts: readers.LoadFacts
) -> dict[str, Any]:
    """The metadata of a checkpoint.

    Args:
        source: the original's name in the manifest: a Hub id, or the name of a folder.
        config: the checkpoint's config.json.
        original: the metadata of the original's card.
        facts: facts that decide which engines load the checkpoint.
    """
    quantization = config.get("quantization_config")
    origin = source.partition(":")[0]
    entries: dict[str, Any] = {"base_model": origin} if _is_id(origin) else {}
    if entries and quantization:
        entries["base_model_relation"] = "quantized"
    if quantization:
        entries["quantized_by"] = MAKER
    loaded = readers.engine_support("transformers", facts)
    if loaded.reason is None and not loaded.loader:  # the Hub then offers the code to load it
        entries["library_name"] = "transformers"
    entries["pipeline_tag"] = "image-text-to-text"
    for key in _FROM_ORIGINAL:
        values = original[key] if isinstance(original.get(key), list) else [original.get(key)]
        if values and all(isinstance(text, str) and 0 < len(text) <= _LONGEST for text in values):
            entries[key] = original[key]
    return entries | {"tags": _tags(config, served=readers.engine_support("vllm", facts).reason is None)}


def _is_id(name: str) -> bool:
    """Whether a name is a Hub id with an owner, `org/name`."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def front_matter(card: Path) -> dict[str, Any]:
    """The metadata of a model card; empty if there is none or it can't be parsed."""
    from huggingface_hub.repocard import metadata_load

    try:
        return (metadata_load(card) or {}) if card.is_file() else {}
    except (ValueError, yaml.YAMLError, RecursionError):
        return {}


def _tags(config: Mapping[str, Any], *, served: bool) -> list[str]:
    """Tags for the Hub: this tool, vLLM if that serves it, format, number formats, and whether visual tokens are reduced."""
    quantization = config.get("quantization_config") or {}
    tags = [MAKER, *(["vllm"] if served else [])]
    if method := quantization.get("quant_method", "compressed-tensors" if quantization else None):
        tags.append(str(method))
    groups = [group for group in (quantization.get("config_groups") or {}).values() if group.get("weights")]
    from vlmcompress.export.formats import compressed_tensors  # which brings torch along

    formats = [compressed_tensors.scheme_of(group).weights for group in groups]
    tags += [f"{fmt.bits}-bit" if fmt.kind == "int" else fmt.name for fmt in formats]
    tags += [f"{quantization['bits']}-bit"] if "bits" in quantization else []
    tags += ["visual-token-reduction"] if "vlmcompress" in config else []
    return list(dict.fromkeys(tags))
