"""The inputs of a run: the model, encoded calibration samples and their origin, as they are or behind a reducer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress.calibration.behind_reducer import decoder, reduced
from vlmcompress.common import hub, identity
from vlmcompress.common.messages import note
from vlmcompress.common.progress import Progress, phase, silent
from vlmcompress.data import encode, load_mixed, provenance
from vlmcompress.data.provenance import notes, token_counts
from vlmcompress.data.samples import Sample
from vlmcompress.hf_hooks import resizing, scorer_file
from vlmcompress.models import VLM
from vlmcompress.planning.calibration_data import check_balance, data_source
from vlmcompress.recipe import Recipe
from vlmcompress.recipe.reducer import ReducerChoice, calibrated
from vlmcompress.recipe.resize import Resize


@dataclass(frozen=True)
class Inputs:
    """A loaded model and the samples that it is to be run on.

    Attributes:
        vlm: the model; behind a reducer its decoder alone, with the same modules.
        batches: encoded samples (`data.encode`), one a batch; empty where nothing has to be run.
        origin: the manifest's description of the calibration data; None for no calibration.
        resize: how images are made smaller, worked out on the samples' images; the model's processor does so.
    """

    vlm: VLM
    batches: list[dict[str, Tensor]]
    origin: dict[str, Any] | None
    resize: Resize | None = None

    def behind(self, reducer: ReducerChoice | None, progress: Progress = silent) -> Inputs:
        """The inputs of the decoder behind a reducer; unchanged if there are no samples or no reducer before the decoder."""
        chosen = calibrated(reducer)
        if chosen is None or not self.batches or self.origin is None:
            return self
        with phase("reducing"):
            shorter = reduced(self.vlm, self.batches, chosen, progress)
        origin = self.origin | token_counts(shorter) | {"reduce": scorer_file.carried(chosen).plain()}
        return Inputs(decoder(self.vlm), shorter, origin, self.resize)


@dataclass(frozen=True)
class Result:
    """The result of a finished run: the folder and its manifest."""

    out: Path
    manifest: dict


def read_inputs(recipe: Recipe, vlm: VLM, needed: str | None, progress: Progress = silent) -> Inputs:
    """Encode the calibration samples for the model; there are none unless something needs them or the recipe names them.

    Args:
        needed: what needs samples, in words for the message that they are missing; None: nothing.
        progress: called with (label, done, total).
    """
    settings = recipe.calibrate
    named = data_source(recipe, vlm.path, needed)
    if named is None:
        return Inputs(vlm, [], None, recipe.resize)
    source = hub.local(named, "dataset")
    mixed = hub.local(settings.text, "dataset") if settings.text else None
    with phase("encoding"):
        samples, texts = load_mixed(source, mixed, samples=settings.samples, seed=recipe.seed)
        resize = settled_resize(recipe.resize, vlm, samples)
        vlm = resizing.resized(vlm, resize) if resize else vlm
        batches = encode([*samples, *texts], vlm, max_length=settings.max_length, progress=progress)
    text = (texts, mixed) if mixed else None
    asked = settings.samples // 2 * 2 if mixed else settings.samples
    more: dict[str, Any] = {"processor": vlm.processor, "text": text, "requested": asked}
    origin = provenance(samples, batches, source, seed=recipe.seed, **more)
    origin |= {"resize": resize.model_dump()} if resize else {}
    check_balance(recipe, origin["tokens"], source)
    for line in notes(origin):
        note(line)
    return Inputs(vlm, batches, origin, resize)


def settled_resize(asked: Resize | None, vlm: VLM, samples: Sequence[Sample]) -> Resize | None:
    """Work out on the samples' images how many tokens an image may have, where that is asked for as a share."""
    if asked is None or asked.settled:
        return asked
    prompts = [tuple(image.size for image in sample.images) for sample in samples]
    return resizing.settle(vlm.spec, vlm.processor, prompts, asked)


def fingerprint(recipe: Recipe, origin: Mapping[str, Any] | None) -> str:
    """Hash everything that the results of the blocks depend on; where they are written is not among it."""
    source, settings = recipe.model, {key: value for key, value in recipe.plain().items() if key != "out"}
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(source.glob("*.safetensors"))]
    parts: list[Any] = [identity.source_identity(source), files, settings, origin, identity.versions()]
    parts.append(torch.get_num_threads())
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
