"""Measure a recovered checkpoint as `recover` does, by what transformers makes of it."""

from __future__ import annotations

import contextlib

import torch
from transformers import AutoModelForImageTextToText

from vlmcompress.models import load
from vlmcompress.models.data import encode, load_samples
from vlmcompress.reduction.hooks import attach_carried
from vlmcompress.training import distillation, teacher_cache


def divergence(source, folder, data, seed=0) -> float:
    """What the verb calls held-out KL, of a written checkpoint, by whole samples of `data` in the order of the run."""
    teacher = load(source)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval()
    batches = encode(load_samples(data, samples=24, seed=seed), teacher)[-8:]
    student = type(teacher)(model, teacher.processor, teacher.spec, folder)
    divergences = []
    with attach_carried(model, teacher.processor, folder) or contextlib.nullcontext(), torch.no_grad():
        for batch in batches:
            kept = teacher_cache.teacher_targets(distillation.whole_logits(teacher, batch))
            divergences.append(
                float(teacher_cache.teacher_divergence(kept, distillation.student_logits(student, batch)))
            )
    return sum(divergences) / len(divergences)
