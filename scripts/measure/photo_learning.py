#!/usr/bin/env python
"""What training adds to a reducer on demo-photo: one scorer for all shares, and the model itself behind `coverage`.

    scripts/measure/photo_learning.py                       trains both, asks the recovered model the test questions
    scripts/measure/bench_photo.py --groups learned --scorer build/photo-learning/scorer.safetensors

Trained is on questions about training pictures, of which the tower is run once an image: it is frozen, and in float32. The
verbs hold out a tenth of the images. What is in WORK is not made again. Differences are in percent of the questions, to the
original with all its tokens and to it behind the same reducer, with an interval of 95%, clustered by image. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyarrow as pa
import pyarrow.parquet as pq
import reduced_answers
import torch
from bench_photo import ROOT, chosen_samples
from methods_table import about, numbered, points
from shared_answers import SharedAsker
from torch import Tensor
from transformers import CLIPVisionModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

sys.path.insert(0, str(ROOT))
from eval.photo import pictures
from eval.photo.rows import SCHEMA, split_rows
from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.recipe import resolve
from vlmcompress.reduction.choice import parse
from vlmcompress.training.learn_reducer import ScorerTraining, learn_reducer
from vlmcompress.training.recover import recover
from vlmcompress.training.train_student import TrainingOptions

SCORER = ScorerTraining(keep=1 / 9, to=0.75, steps=200, batch=8, every=100)
BEHIND = "coverage:1/9"
RECOVERED = TrainingOptions(steps=150, batch=8, every=50)


def questions(work: Path, per_family: int) -> Path:
    """A file of questions about training pictures."""
    path = work / "train.parquet"
    if not path.exists():
        table = pa.Table.from_pylist(split_rows("train", pictures.fetch(ROOT / "build/photo"), per_family), SCHEMA)
        pq.write_table(table, path)
    return path


def wide(model: Path, work: Path) -> Path:
    """A copy of the model in float32, which a CPU trains several times as fast."""
    folder = work / "demo-photo-f32"
    if not folder.exists():
        vlm = models.load(model, dtype=torch.float32)
        vlm.model.save_pretrained(folder)
        vlm.processor.save_pretrained(folder)
    return folder


def remember_images() -> None:
    """Make CLIP towers compute what LLaVA reads of an image once, kept in half precision."""
    forward, kept = CLIPVisionModel.forward, dict[bytes, Tensor]()

    def remembered(self: CLIPVisionModel, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        digests = [hashlib.sha256(image.contiguous().numpy().tobytes()).digest() for image in pixel_values]
        for digest, image in zip(digests, pixel_values, strict=True):
            if digest not in kept:
                with torch.no_grad():
                    out = forward(self, image[None].to(self.dtype), output_hidden_states=True)
                kept[digest] = out.hidden_states[-2][0].half()
        read = torch.stack([kept[digest] for digest in digests]).to(self.dtype)
        return BaseModelOutputWithPooling(last_hidden_state=read, hidden_states=(read, read))

    CLIPVisionModel.forward = remembered


def recipe(model: Path, out: Path, data: Path, most: int, **keys: Any) -> Any:
    """A recipe that trains on at most so many questions of `data`."""
    samples = {"data": str(data), "samples": min(most, pq.read_metadata(data).num_rows)}
    return resolve({"model": str(model), "out": str(out), "scheme": "none", "calibrate": samples} | keys).recipe


def trained(model: Path, data: Path, work: Path) -> dict[str, Any]:
    """Train what is missing of the scorer and the recovered model, in WORK; returns what the files say of their training."""
    scorer, recovered = work / "scorer.safetensors", work / "recovered"
    if not scorer.exists():
        facts = learn_reducer(recipe(model, scorer, data, SCORER.samples), SCORER, resume=True)
        scorer.with_suffix(".json").write_text(json.dumps({name: facts[name] for name in ("held_out_kl", "best_step")}))
    if not recovered.exists():
        recover(recipe(model, recovered, data, RECOVERED.samples, reduce=BEHIND), RECOVERED, resume=True)
    recovery = json.loads((recovered / "vlmcompress.json").read_text())["recovery"]
    return {"scorer": json.loads(scorer.with_suffix(".json").read_text()), "recovery": recovery}


def asked(model: Path, folder: Path, reducers: list[str | None]) -> tuple[list[Tensor], Tensor]:
    """Whether the answers of the model in `folder` to the test questions are right, behind each reducer; and their images."""
    samples, _ = chosen_samples(model, "test", None)
    vlm = models.load(folder)
    asker = SharedAsker(vlm, reduced_answers.prepare(vlm, samples))
    exact = [asker.ask(parse(reduce) if reduce else None).exact.double() for reduce in reducers]
    return exact, numbered([about(sample) for sample in samples])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/demo-photo", help="folder of the assembled model")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build/photo-learning", help="where all that is made is kept"
    )
    parser.add_argument("--per-family", type=int, default=300, help="training questions of each family")
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    data, model = questions(args.work, args.per_family), wide(args.model, args.work)
    remember_images()
    summary = trained(model, data, args.work)
    if summary["recovery"]["changed"]:
        (full, before), clusters = asked(args.model, args.model, [None, BEHIND])
        (whole, after), _ = asked(args.model, args.work / "recovered", [None, BEHIND])
        pairs = {"behind": (before, full), "recovered": (after, full), "won": (after, before), "all": (whole, full)}
        for name, (exact, other) in pairs.items():
            summary[name] = points((exact - other)[None], clusters, 2)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
