"""A checkpoint's own answers from an engine, which computes many at once, kept as they come so that a run can go on."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vlmcompress.engines import Answer, Engine, Request, Settings
from vlmcompress.models.data import Sample
from vlmcompress.training.teacher_cache import PART, answers_in, keep_answers
from vlmcompress.utils.progress import Progress
from vlmcompress.utils.work_folder import WorkFolder


def write_answers(
    engine: Engine, model: Path, samples: Sequence[Sample], work: WorkFolder, most: int, progress: Progress
) -> None:
    """Have `engine` answer the samples that `work` has no answer to, greedily, by at most `most` tokens.

    UserError: the engine can't start or refuses a question; what was answered is kept.
    """
    answers = answers_in(work)
    lacking = [sample for sample in samples if sample.id not in answers]
    if not lacking:
        return

    def keep(answer: Answer) -> None:
        answers[answer.id] = answer.text.strip()
        if len(answers) % PART == 0:
            keep_answers(work, answers)

    try:
        with tempfile.TemporaryDirectory(prefix="vlmcompress-images-") as folder:
            requests = [Request(sample.id, list(_messages(sample, Path(folder))), most) for sample in lacking]
            settings = Settings(max_tokens=most)
            options: dict[str, Any] = {"label": "writing answers", "progress": progress, "on_answer": keep}
            engine.answer(model, requests, media=folder, settings=settings, **options)
    finally:
        keep_answers(work, answers)


def _messages(sample: Sample, folder: Path) -> Iterator[dict[str, Any]]:
    """The sample's turns in OpenAI's format, with its images and videos as files in `folder`."""
    images, videos = iter(sample.images), iter(sample.videos)
    for turn in sample.prompt():
        parts = []
        for part in turn["content"]:
            if part["type"] == "image":
                image = next(images)
                file = folder / f"{hashlib.sha256(image.tobytes() + repr(image.size).encode()).hexdigest()[:32]}.png"
                if not file.exists():
                    image.save(file)
                part = {"type": "image_url", "image_url": {"url": file.as_uri()}}
            elif part["type"] == "video":
                part = {"type": "video_url", "video_url": {"url": next(videos).save(folder).as_uri()}}
            parts.append(part)
        yield {"role": turn["role"], "content": parts}
