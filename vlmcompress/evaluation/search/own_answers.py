"""Questions without labels: short prompts about a folder's images, answered by the original.

Such answers do not measure correctness, but how often a compressed model answers like the original, for which a search can keep
a floor when there are no labels.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmcompress.evaluation.accuracy import noninferiority
from vlmcompress.evaluation.accuracy.compare import LEVEL
from vlmcompress.evaluation.search.candidate import Candidate
from vlmcompress.evaluation.search.trial import Setup, evaluate_candidate
from vlmcompress.evaluation.search.trial_log import SOURCES
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import dump, save_files
from vlmcompress.utils.identity import model_hash, sha256
from vlmcompress.utils.images import SUFFIXES
from vlmcompress.utils.progress import Progress

PROMPTS = (
    "What is the main thing in this image? Answer in a few words.",
    "Which colour stands out in this image? Answer with one word.",
    "How many objects can be seen? Answer with a number.",
    "What text can be read in this image? Write it down, or say none.",
    "Is this a photo, a drawing, a chart or a document? Answer with one word.",
    "Where is the main thing: left, right, top, bottom or middle? Answer with one word.",
)
EACH = 2
"""Number of prompts per image."""
CALIBRATION, SEARCH, CONFIRM = "calibration.jsonl", "questions.jsonl", "confirmation.jsonl"
FEWEST, MOST = 64, 1000
"""Minimum and default maximum number of images."""
_SEARCH, _OTHERS = 15, 28  # fewest images to search on, 30 questions, and fewest to search and calibrate with


@dataclass(frozen=True)
class Parts:
    """The images of a folder, split for calibration, search and confirmation."""

    calibration: list[Path]
    search: list[Path]
    confirm: list[Path]


def split_images(folder: str | Path, most: int | None, margin: float) -> Parts:
    """Split a folder's images by content, so that copies stay together: half for the confirmation, or the minimum number for
    confirming a loss of at most `margin`, and the others for calibration and search.

    Raises:
        UserError: there is no such folder, or it has too few images.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"--images {root} is not a folder; name one with images like those that the model will see")
    by_content: dict[str, Path] = {}
    for path in sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()):
        by_content.setdefault(sha256(path), path)
    images = [by_content[name] for name in sorted(by_content)][: most or MOST]
    confirm = noninferiority.min_images_to_pass(margin, LEVEL)
    if len(images) < (least := max(FEWEST, confirm + _OTHERS)):
        raise UserError(
            f"--images {root} has {len(images)} different images; give at least {least:,}, better hundreds: an agreement "
            f"of {1 - margin:g} cannot be confirmed on less than {confirm:,}"
        )
    others = len(images) - max(confirm, len(images) - len(images) // 4 * 2)
    calibration = min(others // 2, others - _SEARCH)
    return Parts(images[:calibration], images[calibration:others], images[others:])


def write_questions(
    parts: Parts, prompts: Sequence[str], out: Path, setup: Setup, progress: Progress
) -> dict[str, Path]:
    """Write the three files of questions to `out`; those for search and confirmation have the original's answers.

    Existing files of the same model, images and prompts are kept, so that a search can resume.

    Args:
        setup: the original and the engine that answers; its questions are not used.

    Returns:
        Name of a file -> its path.

    Raises:
        UserError: the original fails or gives only empty answers, or existing files have another origin.
    """
    paths = [*parts.calibration, *parts.search, *parts.confirm]
    images = [[sha256(path) for path in paths], [str(path.resolve()) for path in paths]]
    sources = {"model": model_hash(setup.model), "images": images, "prompts": list(prompts)}
    before = json_files.read(out / SOURCES) if (out / SOURCES).is_file() else sources
    if changed := [key for key in sources if before.get(key) != sources[key]]:
        what = " and ".join(changed)
        raise UserError(f"{out} has questions of another {what}; choose another output, or begin anew with --restart")
    save_files(out, {"sources": (SOURCES, dump(sources))})
    files = {}
    for name, some in ((CALIBRATION, parts.calibration), (SEARCH, parts.search), (CONFIRM, parts.confirm)):
        each = 1 if name == CALIBRATION else min(EACH, len(prompts))
        files[name] = out / name
        if files[name].is_file():
            continue
        rows = [
            {
                "id": f"{number}-{turn}",
                "image": str(path.resolve()),
                "question": prompts[(EACH * number + turn) % len(prompts)],
            }
            for number, path in enumerate(some)
            for turn in range(each)
        ]
        if name != CALIBRATION:
            unanswered = _write_rows(out / f"asked-{name}", [row | {"answer": "?"} for row in rows])
            plain = dataclasses.replace(setup, suite=None, data=str(unanswered))
            samples = evaluate_candidate(plain, Candidate(), len(rows), progress).samples
            unanswered.unlink()
            answers = {sample.id: sample.text for sample in samples}
            rows = [row | {"answer": answers[row["id"]]} for row in rows if answers[row["id"]]]
            if not rows:
                raise UserError(f"{setup.model} answers nothing to the prompts; give others with --prompts")
        _write_rows(files[name], rows)
    return files


def _write_rows(file: Path, rows: Sequence[dict[str, str]]) -> Path:
    return save_files(file.parent, {"rows": (file.name, "".join(json.dumps(row) + "\n" for row in rows))})["rows"]
