"""The samples of a recovery: read, given the teacher's answers where they have none, and shown to the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmcompress.calibration import distillation
from vlmcompress.common import hub
from vlmcompress.common.notes import note
from vlmcompress.common.progress import Progress
from vlmcompress.compression.recovery_files import PART, RecoveryFiles
from vlmcompress.data import Sample, load_samples, provenance
from vlmcompress.data.encode import encode_prompt
from vlmcompress.data.encoded import Encoded
from vlmcompress.data.provenance import notes
from vlmcompress.errors import UserError
from vlmcompress.models import VLM
from vlmcompress.recipe import Recipe
from vlmcompress.recovery import objective

FEWEST = 16
"""Samples that a recovery needs."""
HELD_OUT, LEAST_HELD_OUT = 0.1, 8
"""Share of the samples that are held out, and the fewest."""
ANSWER_TOKENS = 32
"""Most tokens of an answer that the teacher writes where the data have none."""


@dataclass(frozen=True)
class Data:
    """Samples that all have answers.

    Attributes:
        source: where they came from, for messages.
        samples: those to train on, then the held-out ones.
        held_out: how many of the last are not trained on.
        written: how many answers the teacher wrote, as the data had none.
    """

    source: str | Path
    samples: list[Sample]
    held_out: int
    written: int


def held_out(samples: int) -> int:
    """How many of so many samples are held out."""
    return max(LEAST_HELD_OUT, round(HELD_OUT * samples))


def read(source: str | Path, recipe: Recipe) -> list[Sample]:
    """Read the samples that a recipe asks for. UserError: too few of them have images.

    Those without stay: nothing is reduced in them, and they hold the model to its answers to text.
    """
    samples = load_samples(hub.local(source, "dataset"), samples=recipe.calibrate.samples, seed=recipe.seed)
    _enough(samples, source)
    return samples


def answered(vlm: VLM, samples: Sequence[Sample], source: str | Path, files: RecoveryFiles, progress: Progress) -> Data:
    """Give each sample an answer, the teacher's own where it has none; one to which the teacher says nothing is left out."""
    known: dict[str, str] = files.noted("answers") or {}
    lacking = [sample for sample in samples if not (sample.answer or "").strip()]
    for number, sample in enumerate(lacking):
        if sample.id not in known:
            known[sample.id] = distillation.greedy_answer(vlm, encode_prompt(sample, vlm), ANSWER_TOKENS)
            if (number + 1) % PART == 0:
                files.note("answers", known)
        progress("writing answers", number + 1, len(lacking))
    files.note("answers", known)
    asked = {sample.id for sample in lacking}
    every = [replace(one, answer=known[one.id]) if one.id in asked else one for one in samples]
    kept = [sample for sample in every if (sample.answer or "").strip()]
    if dropped := len(every) - len(kept):
        note(f"{dropped} samples are left out: they have no answer, and the model says nothing to them")
    _enough(kept, source)
    data = Data(source, kept, held_out(len(kept)), sum(sample.id in asked for sample in kept))
    _shown(data)
    return data


def taught(vlm: VLM, data: Data, recipe: Recipe, files: RecoveryFiles, progress: Progress) -> dict[str, Any]:
    """Keep what the teacher says to all samples, and return the manifest's description of the data."""
    batches = Encoded(data.samples, vlm, max_length=recipe.calibrate.max_length)
    for start in range(0, len(batches), PART):
        if files.has_part(start // PART):
            continue
        found = {}
        for index in range(start, min(start + PART, len(batches))):
            if not distillation.answer_tokens(batches[index])[1]:
                raise UserError(f"{data.samples[index].name}: an image follows its last answer; drop the row")
            found[index] = objective.targets(distillation.teacher_logits(vlm, batches[index]))
            if found[index]["logs"].isnan().any():
                raise UserError(
                    f"{data.samples[index].name}: what the model answers holds NaN, so there is nothing to train by; see "
                    "whether its weights are right (`vlmcompress doctor`), or overflow in float16"
                )
            progress("asking the teacher", index + 1, len(batches))
        files.save_part(start // PART, found)
    more = {"seed": recipe.seed, "processor": vlm.processor}
    origin = provenance(data.samples, batches, hub.local(data.source, "dataset"), **more)
    for line in notes(origin):
        note(line)
    return origin


def _enough(samples: Sequence[Sample], source: str | Path) -> None:
    shown = sum(bool(sample.images) for sample in samples)
    if not shown:
        raise UserError(f"{source} has no images; training needs questions about images")
    if shown < FEWEST:
        raise UserError(
            f"{source} gives {shown} samples with images; training needs at least {FEWEST}, of which {LEAST_HELD_OUT} are "
            "held out, and hundreds to be of use"
        )


def _shown(data: Data) -> None:
    """Raise UserError where all samples with images are on one side: trained on, or held out."""
    cut = len(data.samples) - data.held_out
    for part, samples in (("to train on", data.samples[:cut]), ("that are held out", data.samples[cut:])):
        if not any(sample.images for sample in samples):
            raise UserError(
                f"{data.source}: none of the {len(samples)} samples {part} has an image; give more samples with images, "
                "or another --seed, which decides who is held out"
            )
