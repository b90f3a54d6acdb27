"""The samples of a training run: read them, add the teacher's answers where they have none, and cache the teacher's outputs.

Several workers share them out, some samples at a time, and after each part exchange whether an error occurred.

The objective is the Kullback-Leibler divergence of the student's next-token distribution from the teacher's,
`KL(p || q) = sum_i p_i (log p_i - log q_i)` in nats, the mean over a sample's answer tokens. The teacher's distribution `p` is
computed once and stored. For a vocabulary of up to `WHOLE` tokens it is stored completely, and the divergence is exact. For a
larger one the `TOP` most likely tokens are stored, and all others form one more outcome with the remaining mass. The
divergence is then that of these coarser distributions: never more than the exact one, and zero if that is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.models.data import Reading, Sample, Samples, data_hash, load_samples, provenance, video
from vlmcompress.models.data.encode import Encoded, encode_prompt
from vlmcompress.models.data.provenance import data_notes
from vlmcompress.models.devices import accelerator
from vlmcompress.recipe import Recipe
from vlmcompress.training import distillation
from vlmcompress.utils import distributed, hub, identity
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import note
from vlmcompress.utils.progress import Progress, phase
from vlmcompress.utils.work_folder import WorkFolder

FEWEST = 16
"""Fewest samples for training."""
HELD_OUT, LEAST_HELD_OUT = 0.1, 8
"""Share of the samples that are held out, and their smallest number."""
ANSWER_TOKENS = 32
"""Most tokens of an answer by the teacher, for samples without one."""
PART = 16
"""Number of samples whose targets are in one file, written by one worker."""


@dataclass(frozen=True)
class TrainingData:
    """Samples that all have answers.

    Attributes:
        source: where they came from, for messages.
        samples: the training samples, then the held-out ones.
        held_out: number of held-out samples, at the end of `samples`.
        written: number of samples whose answer is the teacher's, as the data had none.
        skipped: unusable rows: name -> reason.
    """

    source: str | Path
    samples: list[Sample]
    held_out: int
    written: int
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of its samples, for files that say how something was trained."""
        return {
            "trained_on": len(self.samples) - self.held_out,
            "held_out": self.held_out,
            "answers_of_the_teacher": self.written,
        }


def samples_for(trained_on: int) -> int:
    """Number of samples needed to train on `trained_on` of them, as a tenth of all is held out."""
    return trained_on + max(LEAST_HELD_OUT, -(-trained_on // 9))


def apart(samples: Sequence[Sample]) -> tuple[list[Sample], int]:
    """Split off a tenth of the samples to hold out; returns all samples, the held-out ones last, and the number of these.

    Training and held-out samples share no image, as otherwise the measurement would not show generalization. This may hold out
    some more samples, but never over half of all.
    """
    groups = _by_images(samples)
    least, chosen = max(LEAST_HELD_OUT, round(HELD_OUT * len(samples))), set[int]()
    for group in reversed(groups):
        # Whole groups are held out until the share is reached, unless that would exceed half of all samples.
        if len(chosen) < least and len(chosen) + len(group) <= max(least, len(samples) // 2):
            chosen.update(group)
    trained = [sample for number, sample in enumerate(samples) if number not in chosen]
    return trained + [samples[number] for number in sorted(chosen)], len(chosen)


def _by_images(samples: Sequence[Sample]) -> list[list[int]]:
    """Numbers of samples in groups that share no image, in the order of each group's last sample (union-find)."""
    leader, first = list(range(len(samples))), dict[bytes, int]()

    def root(number: int) -> int:
        while leader[number] != number:
            leader[number] = number = leader[leader[number]]
        return number

    for number, sample in enumerate(samples):
        digests = [identity.image_digest(image) for image in sample.images]
        for digest in digests + [clip.digest() for clip in sample.videos]:
            earlier = first.setdefault(digest, number)
            leader[root(number)] = root(earlier)
    groups: dict[int, list[int]] = {}
    for number in range(len(samples)):
        groups.setdefault(root(number), []).append(number)
    return sorted(groups.values(), key=lambda group: group[-1])


def read_samples(source: str | Path, recipe: Recipe, *, reduced: bool) -> Samples:
    """Read a recipe's samples. Raises UserError if too few have images or, with `reduced`, if some have videos.

    Samples without images are kept: nothing is reduced in them, and they preserve the model's answers to text.
    """
    settings = recipe.calibrate
    options: dict[str, Any] = {"samples": settings.samples, "seed": recipe.seed, "reading": Reading.of(settings)}
    samples = load_samples(hub.local(source, "dataset"), **options)
    if reduced:
        video.require_no_videos(samples)
    _enough(samples, source)
    return samples


def cache_teacher(
    recipe: Recipe,
    source: str | Path,
    samples: Sequence[Sample],
    work: WorkFolder,
    progress: Progress,
) -> tuple[VLM, TrainingData, dict[str, Any]]:
    """Load the recipe's model, and cache its answers and log-probabilities in the run's work folder.

    Returns:
        The model, its samples with their answers, and the description of the samples (`provenance`).
    """
    with phase("loading"), distributed.shared_errors():
        vlm = models.load(recipe.model, trust_remote_code=recipe.trust_remote_code)
        if device := accelerator():
            vlm.model.to(device)  # type: ignore[arg-type]
    with phase("teacher"):
        data = answered(vlm, samples, source, work, progress)
        return vlm, data, _taught(vlm, data, recipe, work, progress)


def training_settings(
    command: str, recipe: Recipe, training: Any, samples: Sequence[Sample], particulars: Mapping[str, Any]
) -> dict[str, Any]:
    """All settings that determine a training run, for `WorkFolder.begin`.

    Args:
        training: the values of its flags.
        particulars: settings specific to this command.
    """
    return {
        "command": command,
        **{f"--{name}": value for name, value in asdict(training).items()},
        "--seed": recipe.seed,
        **particulars,
        "calibrate.max_length": recipe.calibrate.max_length,
        "samples with the hash": data_hash(samples),
        "model": {**identity.source_identity(recipe.model), "content_sha256": identity.model_hash(recipe.model)},
        "versions": identity.versions(),
    }


def answers_in(work: WorkFolder) -> dict[str, str]:
    """The teacher's answers so far, of all workers: id of a sample -> answer."""
    notes = [work.read_note(path.stem, dict[str, str]) for path in sorted(work.folder.glob("answers-*.json"))]
    return {id: answer for answers in notes for id, answer in answers.items()}


def keep_answers(work: WorkFolder, answers: Mapping[str, str]) -> None:
    """Write all answers of this worker to its own file."""
    work.write_note(f"answers-{distributed.rank()}", dict(answers))


def targets(work: WorkFolder, index: int) -> dict[str, Tensor]:
    """Read the teacher's targets (`teacher_targets`) for one sample."""
    with work.opened(_part(index // PART)) as file:
        names = [name for name in ("logs", "ids") if f"{index}/{name}" in file.keys()]  # noqa: SIM118
        return {name: file.get_tensor(f"{index}/{name}") for name in names}


def _part(part: int) -> str:
    """Name of the file with the teacher's targets for a part of the samples."""
    return f"teacher-{part:05d}"


def answered(
    vlm: VLM,
    samples: Sequence[Sample],
    source: str | Path,
    work: WorkFolder,
    progress: Progress,
    most: int = ANSWER_TOKENS,
) -> TrainingData:
    """Give each sample without an answer the teacher's own, of at most `most` tokens.

    Samples for which the teacher's answer is empty are left out.
    """
    answers = answers_in(work)
    lacking = [sample for sample in samples if not (sample.answer or "").strip()]
    turn = PART * distributed.world_size()
    for start in range(0, len(lacking), turn):
        with distributed.shared_errors():
            for number, sample in enumerate(distributed.shard(lacking[start : start + turn]), start=1):
                if sample.id not in answers:
                    answers[sample.id] = distillation.greedy_answer(vlm, encode_prompt(sample, vlm), most)
                progress("writing answers", min(start + number * distributed.world_size(), len(lacking)), len(lacking))
            keep_answers(work, answers)
    answers = distributed.merge_dicts(answers)
    unanswered = {sample.id for sample in lacking}
    every = [replace(row, answer=answers[row.id]) if row.id in unanswered else row for row in samples]
    kept = [sample for sample in every if (sample.answer or "").strip()]
    if dropped := len(every) - len(kept):
        note(f"{dropped} samples are left out: they have no answer, and the model's own is empty")
    _enough(kept, source)
    written, skipped = sum(sample.id in unanswered for sample in kept), getattr(samples, "skipped", {})
    data = TrainingData(source, *apart(kept), written, skipped)
    cut = len(data.samples) - data.held_out
    for part, samples in (("to train on", data.samples[:cut]), ("that are held out", data.samples[cut:])):
        if not any(sample.visual for sample in samples):
            raise UserError(
                f"{data.source}: none of the {len(samples)} samples {part} has an image; give more samples with images, "
                "or another --seed, which determines which samples are held out"
            )
    return data


def _taught(vlm: VLM, data: TrainingData, recipe: Recipe, work: WorkFolder, progress: Progress) -> dict[str, Any]:
    """Cache the teacher's log-probabilities for all samples; returns the description of the data (`provenance`)."""
    batches = Encoded(data.samples, vlm, max_length=recipe.calibrate.max_length)
    parts = range(-(-len(batches) // PART))
    for start in range(0, len(parts), distributed.world_size()):
        with distributed.shared_errors():
            for part in distributed.shard(parts[start : start + distributed.world_size()]):
                if not work.has(_part(part)):
                    work.write(_part(part), _said(vlm, data, batches, part, progress))
    options: dict[str, Any] = {"seed": recipe.seed, "processor": vlm.processor, "skipped": data.skipped}
    origin = provenance(data.samples, batches, hub.local(data.source, "dataset"), **options)
    for line in data_notes(origin):
        note(line)
    return origin


@torch.no_grad()
def _said(vlm: VLM, data: TrainingData, batches: Encoded, part: int, progress: Progress) -> dict[str, Tensor]:
    """The teacher's targets for the samples of a part: `NUMBER/KIND` -> tensor."""
    tensors = dict[str, Tensor]()
    for index in range(part * PART, min((part + 1) * PART, len(batches))):
        if not distillation.answer_tokens(batches[index])[1]:
            raise UserError(f"{data.samples[index].name}: an image follows its last answer; drop the row")
        said = teacher_targets(distillation.whole_logits(vlm, batches[index]))
        if said["logs"].isnan().any():
            raise UserError(
                f"{data.samples[index].name}: the model's logits hold NaN, so it cannot be a teacher; check "
                "whether its weights are right (`vlmcompress doctor`), or overflow in float16"
            )
        tensors |= {f"{index}/{kind}": tensor.cpu() for kind, tensor in said.items()}
        progress("running the teacher", index + 1, len(batches))
    return tensors


def _enough(samples: Sequence[Sample], source: str | Path) -> None:
    count = sum(sample.visual for sample in samples)
    if not count:
        raise UserError(f"{source} has no images; training needs questions about images")
    if count < FEWEST:
        raise UserError(
            f"{source} gives {count} samples with images; training needs at least {FEWEST}, of which {LEAST_HELD_OUT} are "
            "held out, and hundreds to be of use"
        )
    if not apart(samples)[1]:
        raise UserError(
            f"{source}: its {len(samples)} samples show too few images to hold some of these out; give questions about more"
        )


WHOLE = 1024
TOP = 64
_LEAST = 1e-7  # smallest remaining mass; below it is rounding error


def teacher_targets(logits: Tensor, whole: int = WHOLE, top: int = TOP) -> dict[str, Tensor]:
    """The teacher's log-probabilities to store, from `logits [tokens, vocabulary]`.

    Args:
        whole: the largest vocabulary that is stored completely.
        top: number of tokens stored for a larger one.

    Returns:
        `logs [tokens, vocabulary]` float32, log-probabilities; or `logs [tokens, top]`, and `ids [tokens, top]` int32.
    """
    logs = logits.float().log_softmax(-1)
    if logits.shape[-1] <= whole:
        return {"logs": logs.contiguous()}
    values, ids = logs.topk(top, -1)
    return {"logs": values.contiguous(), "ids": ids.int().contiguous()}


def teacher_divergence(kept: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Divergence of a student's `logits [tokens, vocabulary]` from the targets of `teacher_targets`: a float32 scalar in nats.

    Raises:
        ValueError: the numbers of tokens differ.
    """
    teacher = kept["logs"].to(logits.device)
    if len(teacher) != len(logits):
        raise ValueError(f"the teacher has {len(teacher)} answer tokens, the student {len(logits)}")
    student = logits.float().log_softmax(-1)
    if "ids" not in kept:
        return (teacher.exp() * (teacher - student)).sum(-1).mean()
    ids = kept["ids"].to(logits.device).long()
    kept_logs = student.gather(-1, ids)
    # KL of the coarser distributions: the kept tokens one by one, and one outcome for all others. By the data processing
    # inequality it is at most the exact one.
    loss = (teacher.exp() * (teacher - kept_logs)).sum(-1)
    left = 1 - teacher.exp().sum(-1)  # the mass of all other tokens
    others = student.scatter(-1, ids, float("-inf")).logsumexp(-1)
    rest = left * (left.clamp_min(_LEAST).log() - others)
    return (loss + torch.where(left > _LEAST, rest, torch.zeros_like(rest))).mean()
