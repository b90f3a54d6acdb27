"""The parts of demo-photo's training, each from a folder that keeps packages, pool and state."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from eval.demo.smol import package as smol
from eval.demo.smol.assemble import tokenizer_of
from eval.photo import pictures
from eval.photo.pictures import Album
from vlmcompress.errors import UserError

from . import package, pool, warmup
from .reading import Plan, Reading
from .sequences import Writer

SMOL = "smol"  # folder of the language model's package
VALIDATION = 200  # scenes
Report = Callable[..., None]


def make_pool(work: Path, scenes: int) -> None:
    """Write the features of `scenes` training scenes, and of the validation scenes."""
    album = pictures.fetch(work)
    package.fetch(work)
    tower = pool.load_tower(package.load(work))
    for split, number in (("validation", VALIDATION), ("train", scenes)):
        pool.fill(work / "pool", split, number, tower, album)


def start_projector(work: Path, steps: int, seed: int, report: Report) -> None:
    """Train the projector by itself, and write it to ``projector.pt``."""
    language, tokenizer, album = _language(work)
    made, held = (pool.load(work / "pool", split, album) for split in ("train", "validation"))
    table = language.get_input_embeddings().weight.detach()
    words = warmup.Words(table, Writer(tokenizer, made.features.shape[1]).encode, album.names)
    projector = warmup.Projector(table.shape[1])
    warmup.start(projector, words, made, steps, Random(seed))
    report(part="start", steps=steps, scenes=len(made.scenes), **warmup.measure(projector, words, held))
    torch.save(projector.state_dict(), work / "projector.pt")


def read(work: Path, plan: Plan, report: Report) -> None:
    """Train projector and adapters. What `--robust` goes on from is kept when the plan's fork comes.

    Raises:
        UserError: the part before has not been run.
    """
    language, tokenizer, album = _language(work)
    state, fork = _state(work, plan.robust), work / "fork.pt"
    if plan.robust and not state.exists():
        _need(fork, "read")
        shutil.copy(fork, state)
    _need(work / "projector.pt", "start")
    projector = warmup.Projector(language.config.hidden_size)
    projector.load_state_dict(torch.load(work / "projector.pt"))
    pools = tuple(pool.load(work / "pool", split, album) for split in ("train", "validation"))
    Reading(plan, language, tokenizer, projector, pools, album.names, state, fork, report).run()


def save_trained(work: Path, robust: bool, path: Path) -> None:
    """Write what was learned in BF16, for the repository.

    Raises:
        UserError: the training has not begun.
    """
    state = _state(work, robust)
    _need(state, "read")
    learned = torch.load(state)["ema"]
    projector = warmup.Projector(len(learned["projector.linear_2.bias"]))
    projector.load_state_dict(torch.load(work / "projector.pt"))
    trained = {name.removeprefix("projector."): v for name, v in learned.items() if name.startswith("projector.")}
    projector.load_state_dict(trained, strict=False)
    learned |= {f"projector.{name}": value for name, value in projector.shipped().items()}
    save_file({name: value.to(torch.bfloat16).contiguous() for name, value in learned.items()}, path)


def _state(work: Path, robust: bool) -> Path:
    return work / ("reading-robust.pt" if robust else "reading.pt")


def _need(path: Path, part: str) -> None:
    if not path.exists():
        raise UserError(f"{path}: there is no such file; run scripts/train/train_demo_photo.py {part}")


def _language(work: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, Album]:
    folder = work / SMOL
    folder.mkdir(parents=True, exist_ok=True)
    smol.fetch(folder)
    language, original = smol.load(folder)
    return language, tokenizer_of(original), pictures.fetch(work)
