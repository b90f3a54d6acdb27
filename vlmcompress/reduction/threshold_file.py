"""The file of DyMU's thresholds, which `vlmcompress learn-reducer` writes and recipes name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import TypedDict

from vlmcompress.models import VLM, block_side
from vlmcompress.reduction import choice
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.utils import folders, identity, schema
from vlmcompress.utils.errors import UserError

METHOD = "dymu"
SCHEMA_VERSION = 1
COMMAND = "vlmcompress learn-reducer MODEL --calib DATA -o FILE.json"
_Model = TypedDict("_Model", {"source": str, "encoder_sha256": str, "encoder": dict[str, Any]})


class _File(TypedDict):
    """The parts of the file that are read; docs/formats.md describes it."""

    schema_version: int
    model: _Model
    reduce: dict[str, Any]


def load_thresholds(vlm: VLM, chosen: ReducerChoice) -> ReducerChoice:
    """Return the reducer with the thresholds of the file that it names, if any. UserError if they belong to another model."""
    name = chosen.reducer.thresholds
    if not isinstance(name, str):
        return chosen
    path = Path(name)
    content = read(path)
    model, now = content["model"], encoder(vlm)
    for key, value in now.items():
        if model["encoder"].get(key) != value:
            difference = f"its encoder has {key} {model['encoder'].get(key)}, that of '{vlm.path.name}' {value}"
            raise _foreign(path, model, difference)
    whole = not any(weight.is_meta for weight in tower(vlm).parameters())
    if whole and (digest := encoder_hash(vlm)) != model["encoder_sha256"]:
        difference = f"sha256 of its encoder is {model['encoder_sha256'][:12]}, that of '{vlm.path.name}' {digest[:12]}"
        raise _foreign(path, model, difference)
    return chosen.with_thresholds(content["reduce"].reducer.thresholds)


def require_thresholds(vlm: VLM, chosen: ReducerChoice) -> ReducerChoice:
    """Load the reducer's file, and raise UserError if thresholds are needed but missing."""
    chosen = load_thresholds(vlm, chosen)
    if chosen.reducer.needs_thresholds:
        raise UserError(f"'{chosen.method}' has no thresholds; learn them with `{COMMAND}`")
    return chosen


def save_thresholds(
    path: Path, vlm: VLM, chosen: ReducerChoice, counts: Sequence[int], calibration: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the file of a reducer with thresholds atomically, and return its content.

    Args:
        counts: number of tokens that each picture of the calibration data keeps (`learning.count_kept`).
        calibration: description of the calibration data.
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        "created_by": identity.versions(),
        "model": {
            "family": vlm.spec.family,
            "source": vlm.path.resolve().name,
            "encoder": encoder(vlm),
            "encoder_sha256": encoder_hash(vlm),
        },
        "calibration": dict(calibration),
        "reduce": chosen.plain(),
        "kept": {
            "mean": round(sum(counts) / len(counts), 2),
            "least": min(counts),
            "most": max(counts),
            "pictures": len(counts),
        },
    }
    folders.save_files(path.parent, {"json": (path.name, folders.dump(content))})
    return content


def encoder(vlm: VLM) -> dict[str, Any]:
    """Facts about an encoder by which thresholds are compared with a model whose weights are not loaded."""
    config = vlm.model.config
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    settings = {key: getattr(config.vision_config, key) for key in keys}
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    settings["feature_layer"] = getattr(config, "vision_feature_layer", -1)
    side = block_side(config)
    return settings | {"block": side} if side > 1 else settings


def encoder_hash(vlm: VLM) -> str:
    """SHA-256 of the encoder's weights as float32, including names and shapes."""
    digest = hashlib.sha256()
    for name, weight in sorted(tower(vlm).state_dict().items()):
        digest.update(f"{name}{list(weight.shape)}".encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def read(path: Path) -> dict[str, Any]:
    """Read the file's content, with `reduce` as a `ReducerChoice`."""
    content = schema.read_typed(_File, path, f"make them with `{COMMAND}`", version=SCHEMA_VERSION)
    reducer = choice.reducer_of_setting(content["reduce"], f"thresholds {path}: reduce")
    if reducer.method != METHOD or not reducer.has_thresholds:
        raise UserError(f"{path} holds no thresholds; make them with `{COMMAND}`")
    return content | {"reduce": reducer}


def _foreign(path: Path, model: Mapping[str, Any], difference: str) -> UserError:
    return UserError(
        f"thresholds {path} are of another model, '{model['source']}': {difference}; learn them with `{COMMAND}`"
    )


def tower(vlm: VLM) -> nn.Module:
    """The encoder's module, whose thresholds these are."""
    return vlm.model.get_submodule(vlm.spec.vision[0])
