"""DyMU's thresholds: learning them from a model's encoder, and the file that keeps them.

Images go through the encoder in batches of 64. In each layer a batch gets the threshold with which it merges as many pairs
as bring `keep` of the tokens to the end when spread evenly over the layers (`tome.schedule`), goes on with what that
leaves, and thresholds are the means over the batches. So images keep `keep` of their tokens on average, plain ones fewer.
Families that cut images into tiles learn from the tiles.

The file is one JSON object:

| key | content |
|---|---|
| schema_version | 1 |
| created_by | versions of vlmcompress and of the packages that shape the result |
| model | family, source name, what its encoder is, and `encoder_sha256`, of the encoder's weights as float32 |
| calibration | what data |
| reduce | method, keep and thresholds, as a recipe has them |
| kept | tokens of each picture that were kept: mean, least, most, of how many; of the calibration data |
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.checkpoint import manifest
from vlmcompress.common.progress import Progress, silent
from vlmcompress.errors import UserError
from vlmcompress.models import VLM
from vlmcompress.recipe import reducer as choosing
from vlmcompress.recipe.reducer import Chosen
from vlmcompress.reducers import REGISTRY, Grid, Merger, Signals
from vlmcompress.reducers import _counter as counts
from vlmcompress.reduction._merging import Layers, M, merger_of, pictures
from vlmcompress.reduction.support import merged_counts

METHOD = "dymu"
SCHEMA_VERSION = 1
BATCH = 64
COMMAND = "vlmcompress thresholds MODEL --calib DATA -o FILE.json"


class _Learning(Merger):
    """Merges each layer with the batch's own threshold, and keeps that in `found`."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.found: list[float] = []
        self._pairs = _schedule(self.grids[0], self.options.keep, self.layers)

    def merge(self, layer: int, states: Tensor, keys: Tensor, heads: int) -> Tensor:
        dymu, scores = REGISTRY.get(METHOD), []
        for image, merged in enumerate(self.merged):
            rows = keys[image, self.aside : self.aside + len(merged.anchor)]
            scores.append(dymu.best(Signals(self.grids[image], keys=rows, heads=heads, merged=merged)))
        self.found.append(dymu.threshold(scores, self._pairs[layer]))
        rest = (1.0,) * (self.layers - len(self.found))
        self.options = dataclasses.replace(self.options, thresholds=(*self.found, *rest))
        return super().merge(layer, states, keys, heads)


@torch.no_grad()
def learn(vlm: VLM, batches: Sequence[Mapping[str, Tensor]], chosen: Chosen, progress: Progress = silent) -> Chosen:
    """The reducer with thresholds for this model, learnt from the images of `batches` where it names none.

    Args:
        batches: inputs from the model's processor; those without images are left out.
        chosen: `dymu`; a file that it names is read instead (`resolve`).
    """
    chosen = resolve(vlm, chosen)
    if chosen.options.thresholds is not None:
        return chosen
    parts, found = _pictures(vlm, batches), []
    for part in parts:
        found.append(_run(vlm, part, chosen.options, _Learning).found)
        progress("thresholds", len(found), len(parts))
    return _with(chosen, REGISTRY.get(METHOD).average(found))


@torch.no_grad()
def kept(vlm: VLM, batches: Sequence[Mapping[str, Tensor]], chosen: Chosen) -> list[int]:
    """How many tokens each picture (image or tile) of `batches` keeps, in order. `chosen` has its thresholds."""
    return [
        len(one.anchor) for part in _pictures(vlm, batches) for one in _run(vlm, part, chosen.options, Merger).merged
    ]


def counter(vlm: VLM, batches: Sequence[Mapping[str, Tensor]], chosen: Chosen) -> counts.Counter:
    """What says from pixels how many tokens a picture keeps, fitted to what the pictures of `batches` keep."""
    own = [one for inputs in batches if inputs.get("pixel_values") is not None for one in pictures(vlm, inputs)]
    least, tokens = merged_counts(vlm.model.config)
    patch = vlm.model.config.vision_config.patch_size
    return counts.fit(own, kept(vlm, batches, chosen), patch, tokens, least)


def resolve(vlm: VLM, chosen: Chosen) -> Chosen:
    """The reducer with the thresholds of the file that it names, if it names one. UserError if they are not of this model."""
    name = getattr(chosen.options, "thresholds", None)
    if not isinstance(name, str):
        return chosen
    path = Path(name)
    content = _read(path)
    model, now = content["model"], encoder(vlm)
    for key, value in now.items():
        if model["encoder"].get(key) != value:
            what = f"its encoder has {key} {model['encoder'].get(key)}, that of '{vlm.path.name}' {value}"
            raise _foreign(path, model, what)
    if not _skeleton(vlm) and (digest := encoder_hash(vlm)) != model["encoder_sha256"]:
        what = f"sha256 of its encoder is {model['encoder_sha256'][:12]}, that of '{vlm.path.name}' {digest[:12]}"
        raise _foreign(path, model, what)
    return _with(chosen, content["reduce"].options.thresholds)


def known(vlm: VLM, chosen: Chosen) -> Chosen:
    """`resolve`, and UserError where thresholds are needed and not there."""
    chosen = resolve(vlm, chosen)
    if getattr(chosen.options, "thresholds", ()) is None:
        raise UserError(f"'{chosen.method}' has no thresholds; learn them with `{COMMAND}`")
    return chosen


def save(path: Path, vlm: VLM, chosen: Chosen, found: Sequence[int], calibration: Mapping[str, Any]) -> dict[str, Any]:
    """Write the file of a reducer with thresholds, whole or not at all, and return what is in it.

    Args:
        found: how many tokens each picture of the calibration data keeps (`kept`).
        calibration: what data.
    """
    from vlmcompress.report import files

    content = {
        "schema_version": SCHEMA_VERSION,
        "created_by": manifest.versions(),
        "model": {
            "family": vlm.spec.family,
            "source": vlm.path.resolve().name,
            "encoder": encoder(vlm),
            "encoder_sha256": encoder_hash(vlm),
        },
        "calibration": dict(calibration),
        "reduce": chosen.plain(),
        "kept": {
            "mean": round(sum(found) / len(found), 2),
            "least": min(found),
            "most": max(found),
            "pictures": len(found),
        },
    }
    files.save(path.parent, {"json": (path.name, files.dump(content))})
    return content


def encoder(vlm: VLM) -> dict[str, Any]:
    """What thresholds must have in common with a model whose weights are not read."""
    config = vlm.model.config
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    return {key: getattr(config.vision_config, key) for key in keys} | {"feature_layer": config.vision_feature_layer}


def encoder_hash(vlm: VLM) -> str:
    """SHA-256 of the encoder's weights as float32, names and shapes among them."""
    digest = hashlib.sha256()
    for name, weight in sorted(_tower(vlm).state_dict().items()):
        digest.update(f"{name}{list(weight.shape)}".encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """The file's content, `reduce` as the reducer."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read thresholds {path} ({type(error).__name__}); make them with `{COMMAND}`"
        ) from error
    schema = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(schema, int) and schema > SCHEMA_VERSION:
        raise UserError(
            f"thresholds {path} are of schema {schema}, this vlmcompress reads {SCHEMA_VERSION}; upgrade it"
        )
    try:
        found = choosing.read(content["reduce"], f"thresholds {path}: reduce")
        if found.method != METHOD or not isinstance(found.options.thresholds, tuple):
            raise TypeError
        model = content["model"]
        known = {"source": str(model["source"]), "encoder_sha256": str(model["encoder_sha256"])}
        return {"reduce": found, "model": {**known, "encoder": dict(model["encoder"])}}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} holds no thresholds; make them with `{COMMAND}`") from error


def _foreign(path: Path, model: Mapping[str, Any], what: str) -> UserError:
    return UserError(
        f"thresholds {path} are of another model, '{model['source']}': {what}; learn them with `{COMMAND}`"
    )


def _schedule(grid: Grid, keep: float, layers: int) -> list[int]:
    tome = REGISTRY.get("tome")
    try:
        return tome.schedule(math.prod(grid), tome.budget(grid, tome.Options(keep=keep)), layers)
    except ValueError as error:
        raise UserError(f"keep={keep:g}: {error}; choose a larger share") from error


def _pictures(vlm: VLM, batches: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Those of all batches, `[images, 3, height, width]`, in parts of about `BATCH`, in the model's type."""
    found = [pictures(vlm, inputs) for inputs in batches if inputs.get("pixel_values") is not None]
    if not found:
        raise UserError("thresholds are learnt from images, and the calibration data have none; name some with --calib")
    every = torch.cat(found).to(vlm.model.device, vlm.model.dtype)
    return list(every.chunk(-(-len(every) // BATCH)))


def _run(vlm: VLM, pixels: Tensor, options: Any, kind: type[M]) -> M:
    """What has merged in the encoder's layers, of pictures `[images, 3, height, width]`."""
    method = REGISTRY.get(METHOD)
    layers = Layers(vlm, lambda states: merger_of(vlm, states, pixels, method, options, kind))
    try:
        _tower(vlm)(pixels)
    finally:
        layers.remove()
    assert isinstance(layers.merger, kind)
    return layers.merger


def _tower(vlm: VLM) -> nn.Module:
    return vlm.model.get_submodule(vlm.spec.vision[0])


def _skeleton(vlm: VLM) -> bool:
    return any(weight.is_meta for weight in _tower(vlm).parameters())


def _with(chosen: Chosen, thresholds: tuple[float, ...]) -> Chosen:
    return dataclasses.replace(chosen, options=dataclasses.replace(chosen.options, thresholds=thresholds))
