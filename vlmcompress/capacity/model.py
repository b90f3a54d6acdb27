"""A model as its folder shows it without a weight being read: config.json, and headers of weight files where there are any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from vlmcompress import models
from vlmcompress.capacity import decoder
from vlmcompress.capacity.decoder import Decoder
from vlmcompress.common.tensor_files import INDEX, Spec
from vlmcompress.errors import UserError
from vlmcompress.models import ModelSpec, Source


@dataclass(frozen=True)
class Model:
    """A model to be served.

    Attributes:
        path: its folder.
        config: the content of config.json.
        meta_model: the model on the meta device, shapes only.
        decoder: its decoder.
        stored: tensor -> type and shape: those on disk, or those that the config asks for.
        headers: whether there are weight files.
        spec: its family; None: one that this package does not know, whose weights stay as they are.
        pictures: the family by whose rule images become tokens; None: not known. That of Qwen3-VL for all with its tower.
        source: the checkpoint for `planning`; None where nothing can be planned, as it is quantized or of no known family.
        quantized: the method that it is quantized with already; empty: none.
    """

    path: Path
    config: dict[str, Any]
    meta_model: PreTrainedModel
    decoder: Decoder
    stored: dict[str, Spec]
    headers: bool
    spec: ModelSpec | None
    source: Source | None
    pictures: ModelSpec | None
    quantized: str = ""


def open_model(path: Path) -> Model:
    """Open the model in a folder. Raises `UserError` for a config that cannot be."""
    weights = path.is_dir() and (any(path.glob("*.safetensors")) or (path / INDEX).is_file())
    config = models.read_config(path, weights)
    decoder.check(config, path / "config.json")
    try:
        spec = models.spec_for(config)
    except UserError:
        spec = None
    found = config.get("quantization_config") or {}
    quantized = str(found.get("quant_method") or "quantized") if found else ""
    if spec and not quantized:
        source = Source.of(path) if weights else Source.outline(path)
        described = decoder.describe(source.meta_model)
        return Model(path, config, source.meta_model, described, source.stored, weights, spec, source, spec)
    meta_model = models.build_meta_model(path, weights, known=False)
    if weights:
        headers = models.tensor_headers(path)
        stored = {name: Spec(entry["dtype"], tuple(entry["shape"])) for name, entry in headers.items()}
    elif quantized:
        raise UserError(
            f"{path} is quantized and has no weight files that show its size; download them, or plan the original"
        )
    else:
        tied = models.tied_names(meta_model)
        stored = {name: Spec.of(tensor) for name, tensor in meta_model.state_dict().items() if name not in tied}
    described, pictures = decoder.describe(meta_model), spec or _like(meta_model)
    return Model(path, config, meta_model, described, stored, weights, spec, None, pictures, quantized)


def _like(meta_model: PreTrainedModel) -> ModelSpec | None:
    """The family that a model of an unknown one takes its tower from: that of Qwen3-VL, as Qwen3.5 does."""
    like: ModelSpec = models.REGISTRY.get("qwen3-vl").SPEC
    try:
        blocks: Any = meta_model.get_submodule(like.vision_layers)
        return like if "Qwen3" in type(blocks[0]).__name__ else None
    except (AttributeError, IndexError):
        return None
