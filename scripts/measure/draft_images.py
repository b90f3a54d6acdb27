#!/usr/bin/env python3
"""What a draft head guesses right by what it gets of images: no visual token, one, few, all, and a vector of the image.

    scripts/measure/draft_images.py MODEL DATA ANSWERS [--images none hidden divprune:0.25 all ...] [--steps 400] [--seeds 2]
    scripts/measure/draft_images.py MODEL DATA ANSWERS --drafts FOLDER ... --samples 600    # judges drafts that were trained so

ANSWERS is a JSON object of MODEL's answers to the questions of DATA (`scripts/measure/draft_speed.py` keeps both in its folder:
answers-*.json and calibration-*.parquet). A draft is trained for each value of `--images` (as `vlmcompress draft` has it;
`+vector` behind one adds the vector), from the same first values and on the same samples in the same order, and judged on the
samples that are held out. What depends on the target alone is computed once. Blocks of the cache have one token here, so a
share is exact. `accepted` is how many of three guesses in a row are right, with its 95% interval and that of its difference
from the first kind, by resampling the held-out answers; `by_seed` is it for each training, whose own chance these intervals
leave out. `rows` are those of the draft's context, `seconds` the processor time of training. The last line is one JSON object.
"""

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file
from torch import Tensor

from vlmcompress.export import draft_images
from vlmcompress.export.draft_folder import WEIGHTS, Draft
from vlmcompress.models import VLM
from vlmcompress.models.data import load_samples
from vlmcompress.recipe import Recipe, resolve
from vlmcompress.training import distillation, eagle3, teacher_cache
from vlmcompress.training.draft import guessable
from vlmcompress.training.draft_lessons import Lessons, load_target
from vlmcompress.training.train_loop import order, rate

KINDS = ("none", "hidden", "all", "divprune:0.0124", "divprune:0.0625", "divprune:0.25", "hidden+vector", "none+vector")
BATCH, DRAWS = 8, 1000


@dataclass
class Seen:
    """What the target gave of a sample, in the place of the hooks on it."""

    ids: Tensor
    modality: Tensor
    taps: Tensor
    positions: Tensor
    embeds: Tensor
    lesson: eagle3.Lesson

    def joined(self) -> Tensor:
        return self.taps

    def places(self, length: int) -> Tensor:
        return self.positions[:length]


def seen(lessons: Lessons) -> list[Seen | None]:
    """What the target gives of each sample; None where its answer has one token."""
    every: list[Seen | None] = []
    for index, batch in enumerate(lessons.batches):
        lesson = lessons.lesson(index)
        ids, modality, taps = batch["input_ids"][0], batch["modality"][0], lessons.taps
        every.append(
            lesson and Seen(ids, modality, taps.joined(), taps.places(len(ids)).clone(), taps.embeds.clone(), lesson)
        )
    return every


def lesson_of(lessons: Lessons, sample: Seen) -> eagle3.Lesson:
    """The lesson of a sample as `lessons.images` has it."""
    lessons.taps = sample  # type: ignore[assignment]
    context = lessons._context(sample.ids, sample.modality)
    behind = len(sample.modality) - distillation.answer_tokens({"modality": sample.modality[None]})[0]
    return replace(sample.lesson, **{"image": None, **context}, begin=len(context["embeds"]) - behind)


def trained(lessons: Lessons, samples: list[eagle3.Lesson], steps: int, lr: float, seed: int) -> dict[str, Tensor]:
    """A draft after `steps` steps."""
    tensors = {name: tensor.requires_grad_() for name, tensor in lessons.create(seed).items()}
    optimizer = torch.optim.AdamW(list(tensors.values()), lr=lr, weight_decay=0.0)
    for step in range(steps):
        for index in order(len(samples), step, BATCH, seed):
            (eagle3.loss(lessons.guesses(tensors, samples[index]), samples[index]) / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
    return tensors


def judged(folder: Path, target: VLM, data: teacher_cache.Data, recipe: Recipe) -> Tensor:
    """What `eagle3.accepted` counts for each held-out sample with a trained draft, `[samples, 1 + steps]`."""
    draft, stored = Draft.of(folder), load_file(folder / WEIGHTS)
    held_out = replace(data, samples=data.samples[-data.held_out :])
    vocabulary = guessable(stored, len(target.model.get_output_embeddings().weight))
    lessons = Lessons(target, held_out, recipe, draft.method, draft.images, vocabulary)
    tensors = {name: stored[name].float() for name in lessons.shape.tensors()}
    each = [lesson for index in lessons.held_out if (lesson := lessons.lesson(index))]
    return torch.stack([eagle3.accepted(lessons.guesses(tensors, lesson), lesson) for lesson in each])


def resampled(counts: Tensor) -> Tensor:
    """Accepted guesses of three with the samples drawn anew, `[draws]`; the same samples for equally many."""
    random = torch.Generator().manual_seed(0)
    drawn = counts[torch.randint(len(counts), (DRAWS, len(counts)), generator=random)].sum(1)
    return drawn[:, 1:].sum(1) / drawn[:, 0]


def interval(values: Tensor) -> list[float]:
    """The 95% interval of the mean, of `[draws]`."""
    return [round(float(values.quantile(q)), 3) for q in (0.025, 0.975)]


@torch.no_grad()
def compare(folders: Sequence[Path], data: teacher_cache.Data, recipe: Recipe) -> None:
    """Print how many guesses of each draft are accepted, and the differences from the first."""
    target = load_target(recipe)
    counts = {folder.name: judged(folder, target, data, recipe) for folder in folders}
    first = resampled(next(iter(counts.values())))
    rows = []
    for name, each in counts.items():
        total, draws = each.sum(0), resampled(each)
        mean = round(float(total[1:].sum() / total[0]), 4)
        rows.append(
            {"draft": name, "accepted": mean, "interval": interval(draws), "difference": interval(draws - first)}
        )
    print(json.dumps({"held_out": len(each), "guesses": int(total[0]), "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--drafts", type=Path, nargs="+", help="judge these, of the same samples, and train none")
    parser.add_argument("--images", nargs="+", default=list(KINDS))
    parser.add_argument("--samples", type=int, default=700)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind")
    args = parser.parse_args()
    recipe = resolve({"model": str(args.model), "out": "none", "scheme": "none"}).recipe
    answers = {name: text for name, text in json.loads(args.answers.read_text()).items() if text.strip()}
    samples = load_samples(args.data, samples=args.samples, seed=0)
    samples = [replace(sample, answer=answers[sample.id].strip()) for sample in samples if sample.id in answers]
    data = teacher_cache.Data(args.data, *teacher_cache.apart(samples), 0)
    if args.drafts:
        compare(args.drafts, data, recipe)
        return
    base = Lessons(load_target(recipe), data, recipe, "eagle3", draft_images.DraftImages(), 32000)
    targets = seen(base)
    rows, first = [], torch.empty(0)
    for kind in args.images:
        began, name = time.process_time(), kind.removesuffix("+vector")
        lessons = copy.copy(base)
        lessons.images = draft_images.parse(name, name != kind, block=1)
        lessons.shape = replace(base.shape, vector=lessons.images.vector)
        parts = [[lesson_of(lessons, s) for s in part if s] for part in (targets[: base.first], targets[base.first :])]
        trainings = []
        for seed in range(args.seeds):
            tensors = trained(lessons, parts[0], args.steps, args.lr, seed)
            with torch.no_grad():
                trainings.append(
                    torch.stack([eagle3.accepted(lessons.guesses(tensors, each), each) for each in parts[1]])
                )
        counts = torch.stack(trainings).sum(0)
        total = counts.sum(0)
        accepted = resampled(counts)
        first = accepted if not len(first) else first
        row = {
            "images": kind,
            "by_position": [round(float(x), 4) for x in total[1:] / total[0]],
            "accepted": round(float(total[1:].sum() / total[0]), 4),
            "by_seed": [round(float(each[:, 1:].sum() / each[:, 0].sum()), 3) for each in trainings],
            "interval": interval(accepted),
            "difference": interval(accepted - first),
            "rows": round(sum(len(each.embeds) for each in parts[1]) / len(parts[1]), 1),
            "seconds": round(time.process_time() - began, 1),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(json.dumps({"model": args.model.name, "steps": args.steps, "held_out": len(counts), "rows": rows}))


if __name__ == "__main__":
    main()
