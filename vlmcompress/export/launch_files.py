"""Facts about a checkpoint from its config.json and manifest, and the launch files that `launch` makes of them, in `serve/`."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmcompress import models
from vlmcompress.export import launch, readers
from vlmcompress.export.gguf import REGISTRY as GGUF_FAMILIES
from vlmcompress.export.gguf import ModelFacts
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.recipe import targets
from vlmcompress.reduction import block as reducer_block
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

FOLDER = "serve"


def launch_facts(config: Mapping[str, Any], record: Mapping[str, Any], name: str) -> readers.LoadFacts:
    """Gather the facts that decide which engines load a checkpoint, and those for its launch files.

    Args:
        config: content of config.json.
        record: the manifest; missing fields count as unknown.
        name: name of the checkpoint's folder.

    Raises:
        UserError: the reducer's block is invalid.
    """
    recipe, sizes = record.get("recipe") or {}, record.get("size") or {}
    carried, reducer = reducer_block.read_reducer(config), None
    if carried:
        choice = carried.reducer
        reducer = readers.Reducer(
            " ".join(choice.label.split()), choice.takes_shares, recipe.get("engine", "vllm") == "vllm"
        )
    machine, target_name = None, recipe.get("target")
    if isinstance(target_name, str) and target_name in targets.REGISTRY:
        target = targets.get_target(target_name)
        machine = readers.Machine(target.title, target.memory, target.capability)
    try:
        # speculative decoding by the checkpoint's own head
        draft = "mtp" if models.mtp_blocks(models.spec_for(dict(config)), config) else ""
    except UserError:
        draft = ""
    weights = sizes.get("weights_after")
    weights = weights if isinstance(weights, int) else 0
    splits = record.get("devices")
    splits = tuple(count for count in splits if isinstance(count, int)) if isinstance(splits, list) else None
    return readers.gather_facts(
        config,
        name,
        weights=weights,
        machine=machine,
        reducer=reducer,
        experts=models.mixture(config) is not None,
        draft=draft,
        splits=splits,
    )


def _generation(folder: Path) -> dict[str, Any]:
    """`LoadFacts.generation` and `stops` of a folder; what is missing or invalid counts as not set."""
    try:
        settings = json_files.read(folder / "generation_config.json", finite=True)
        added = json_files.read(folder / "tokenizer.json")["added_tokens"]
        texts = {token["id"]: token["content"] for token in added}
        ends = settings.get("eos_token_id")
        stops = [texts.get(end, "") for end in (ends if isinstance(ends, list) else [ends])]
        numbers = {name: float(value) for name, value in settings.items() if isinstance(value, int | float)}
        stops = [text for text in stops if text.isprintable() and text and '"' not in text]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}
    return {"generation": numbers, "stops": tuple(stops)}


def token_limits(folder: Path, processor: Any) -> tuple[int, int] | None:
    """Least and most visual tokens of an image, which llama.cpp reads from its flags alone; None: it has no such limits for the
    checkpoint's family.

    Raises:
        UserError: the folder has no checkpoint of a family that llama.cpp has.
    """
    family = models.spec_for(json_files.read(folder / "config.json")).family
    return GGUF_FAMILIES.get(family).limits(ModelFacts({}, processor.image_processor.to_dict()))


def write_launch_files(folder: Path, record: Mapping[str, Any], name: str) -> list[Path]:
    """Replace `serve/` and return its files. The caller has to update the manifest's hashes.

    Args:
        folder: the checkpoint, with its config.json.
        record: its manifest; hashes are not read.
        name: the name under which the checkpoint will be served: that of its final folder.
    """
    facts = launch_facts(json_files.read(folder / "config.json"), record, name)
    facts = replace(facts, **_generation(folder))
    if facts.format == "gguf":
        with contextlib.suppress(UserError):  # a folder whose processor can't be loaded
            facts = replace(facts, image_tokens=token_limits(folder, models.load_processor(folder)))
    texts = launch.render_launch_files(facts)
    if (folder / MANIFEST).is_file():  # else the folder is being written, and its `serve/` came from the source
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    for place, text in texts.items():
        path = folder / FOLDER / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [folder / FOLDER / place for place in texts]
