"""The parts of demo-photo's training, each from a folder that keeps packages, pool and state."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from eval.photo import pictures
from eval.photo.pictures import Album
from vlmcompress.utils.errors import UserError

from . import package, pool, warmup
from .language import begin, tokenizer_of
from .reading import Plan, Reader, Reading
from .unseen import Unseen

VALIDATION = 200  # scenes
Report = Callable[..., None]


def make_pool(work: Path, scenes: int) -> None:
    """Write the features of `scenes` training scenes, and of the validation scenes."""
    album = pictures.fetch(work)
    package.fetch(work)
    tower = pool.load_tower(package.load(work))
    for split, number in (("validation", VALIDATION), ("train", scenes)):
        pool.fill(work / "pool", split, number, tower, album)


def train_projector(work: Path, steps: int, seed: int, report: Report) -> None:
    """Train the projector and write it to ``projector.pt``.

    Raises:
        UserError: the part before has not been run.
    """
    reader, _, album = _reader(work, "language")
    result, held_out = (pool.load(work / "pool", split, album) for split in ("train", "validation"))
    warmup.train(reader.projector, reader.words, result, steps, Random(seed))
    unseen, random = Unseen(result), Random(seed)
    scenes, features = zip(*(unseen.draw(random, k) for k in range(VALIDATION)), strict=True)
    drawn = pool.Pool(list(scenes), torch.stack(features).numpy(), result.items[:VALIDATION])
    for pictures_of, output in (("train", result), ("validation", held_out), ("nobody", drawn)):
        report(part="projector", steps=steps, of=pictures_of, **warmup.measure(reader.projector, reader.words, output))
    torch.save(reader.projector.state_dict(), work / "projector.pt")


def read(work: Path, plan: Plan, report: Report) -> None:
    """Train the language model, on ideal or real tokens. What `--robust` goes on from is kept when the plan's fork comes.

    Raises:
        UserError: the part before has not been run.
    """
    reader, tokenizer, album = _reader(work, "language" if plan.part == "joint" else None)
    state = _state(work, plan.part, plan.robust)
    if plan.part == "joint":
        if plan.robust and not state.exists():
            _need(work / "fork.pt", "joint")
            shutil.copy(work / "fork.pt", state)
        _load_projector(reader, work)
    splits = ("train" if plan.part == "joint" else "validation", "validation")
    pools = tuple(pool.load(work / "pool", split, album) for split in splits)
    Reading(plan, reader, tokenizer, pools, album, state, report).run()


def save_trained(work: Path, robust: bool, path: Path) -> None:
    """Write what was learned in BF16, for the repository.

    Raises:
        UserError: the training has not begun.
    """
    reader, _, _ = _reader(work, "joint", robust)
    learned = {f"language.{name}": value for name, value in reader.language.state_dict().items()}
    learned |= {f"projector.{name}": value for name, value in reader.projector.shipped().items()}
    save_file({name: value.to(torch.bfloat16).contiguous() for name, value in learned.items()}, path)


def _reader(work: Path, part: str | None, robust: bool = False) -> tuple[Reader, PreTrainedTokenizerFast, Album]:
    """The reader as a part of the training left it, on average over the last steps; None: as it begins."""
    album = pictures.fetch(work)
    tokenizer = tokenizer_of(album)
    torch.manual_seed(0)
    reader = Reader(begin(tokenizer), tokenizer, album.names)
    if part is not None:
        state = _state(work, part, robust)
        _need(state, part)
        if part == "joint":
            _load_projector(reader, work)
        reader.load_state_dict(torch.load(state)["ema"], strict=False)
    return reader, tokenizer, album


def _load_projector(reader: Reader, work: Path) -> None:
    _need(work / "projector.pt", "projector")
    reader.projector.load_state_dict(torch.load(work / "projector.pt"))


def _state(work: Path, part: str, robust: bool) -> Path:
    return work / f"{part}{'-robust' if robust else ''}.pt"


def _need(path: Path, part: str) -> None:
    if not path.exists():
        raise UserError(f"{path}: there is no such file; run scripts/train/train_demo_photo.py {part}")
