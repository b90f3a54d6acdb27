"""Put a demo with a skill together: the demo's files, its decoder's weights with the trained adapters added, test data."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from eval.demo.export import disk_name
from eval.demo.skills.watching import watch
from eval.demo.smol.adapter import merge
from eval.world.boxes import box_rows
from eval.world.clips import frame_rows
from eval.world.freeze import write_rows
from eval.world.pages import page_rows
from vlmcompress.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
LAYERS = "model.language_model.layers."
WORDS = {"embed": "model.language_model.embed_tokens.weight", "head": "lm_head.weight"}
ROWS = {"calibration": 120, "test": 1000}
DATA = {"boxes": (box_rows, ROWS), "pages": (page_rows, ROWS), "clips": (frame_rows, {"calibration": 120})}
CARD = Path(__file__).with_name("README.md")


def assemble(skill: str, model: str, folder: Path, trained: Path | None = None) -> None:
    """Write the checkpoint to `folder`, replacing what is there; `trained`: adapters, by default the repository's.

    A demo that gives boxes or reads labels gets questions, test and calibration, where `bundled_data` looks; one that watches
    clips a calibration split, as the suite `clips` draws its own.
    """
    source = ROOT / "eval/demo" / f"demo-{model}"
    trained = trained or Path(__file__).with_name(f"{skill}-{model}.safetensors")
    if not trained.is_file():
        raise UserError(f"{trained} is not there: demo-{model} was not taught {skill}")
    inner = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    layers, learned = inner.model.language_model.layers, load_file(trained)
    merge(layers, learned)
    kind = "qwen" if model == "qwen" else "llava"
    tensors = load_file(source / "model.safetensors")
    weights = {LAYERS + name: weight for name, weight in layers.state_dict().items()}
    weights |= {full: learned[name] for name, full in WORDS.items() if name in learned}
    for name, weight in weights.items():
        key = disk_name(kind, name)
        tensors[key] = weight.to(tensors[key].dtype).contiguous()
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    if skill == "clips":
        config, processor = AutoConfig.from_pretrained(source), AutoProcessor.from_pretrained(source)
        watch(config, processor)
        config.save_pretrained(part)
        processor.save_pretrained(part)
    (part / "README.md").write_text(CARD.read_text() if CARD.is_file() else "")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    if skill in DATA:
        rows, splits = DATA[skill]
        data = folder.parent / "data" / folder.name.removeprefix("demo-")
        for split, number in splits.items():
            write_rows(data / f"{split}.parquet", rows(split, kind, number))
