"""Train demo-qwen a little further on images of several sizes, as real models of its family have seen them.

The shipped demo-qwen knows images at one scale alone. Made smaller by its own processor they are like nothing that it has
seen, and its answers say nothing about what smaller images cost a model of the world outside. This one has been shown all
scales, so that choosing among an image's tokens can be compared with making the image smaller.
"""

import json
import time
from pathlib import Path
from random import Random

import torch
from torch import nn
from torch.nn import functional as F

from eval.world.rows import View, images_of
from eval.world.vocab import FAMILIES
from vlmcompress import models
from vlmcompress.models import ImageSetting
from vlmcompress.reduction.hooks import resizing

from .export import export
from .learner import Learner
from .sequences import Writer, token_grids, training_batch

SCALES = (None, None, 64, 49, 36, 25, 16)
"""Most tokens of an image, of which one is drawn for each batch; None: as it is."""
RATE, WARM, EMA = 6e-4, 60, 0.99


class Scales:
    """A training: the model, and what it is shown."""

    def __init__(self, start: Path, seed: int):
        self.vlm = models.load(start)
        self.vlm.model.float().train().requires_grad_(True)
        self.tokenizer = self.vlm.processor.tokenizer
        self.writer = Writer("qwen", self.tokenizer)
        self.learner = Learner("qwen", self.vlm.model, self.writer.image_id)
        self.random = Random(seed)
        self.weights = dict.fromkeys(FAMILIES, 0.5) | {"text": 0.1}
        by_tokens = {setting.tokens: setting for setting in resizing.image_settings(self.vlm.spec, self.vlm.processor)}
        self.settings = [by_tokens[tokens] if tokens else ImageSetting(0) for tokens in SCALES]

    def loss(self) -> torch.Tensor:
        """The loss of a fresh batch of images, all at a scale that is drawn."""
        processor = self.random.choice(self.settings).applied(self.vlm.processor)

        def grids(view: View | None) -> list[tuple[int, int]]:
            losses = []
            for (rows, columns), _ in zip(token_grids(view), images_of(view), strict=True):
                (piece,) = self.vlm.spec.layout(processor, 16 * columns, 16 * rows, 1).pieces
                losses.append((piece.rows, piece.columns))
            return losses

        batch = training_batch(self.writer, self.random, 8, self.weights, grids)
        visual = None
        if len(batch.pixels):
            images = list(batch.pixels.permute(0, 3, 1, 2))
            processed = processor.image_processor(images, return_tensors="pt", input_data_format="channels_first")
            visual = self.vlm.model.model.visual(
                processed["pixel_values"], grid_thw=processed["image_grid_thw"]
            ).pooler_output
        logits, target = self.learner.answer_logits(batch, visual)
        return F.cross_entropy(logits, target)


def train(start: Path, folder: Path, minutes: float, seed: int = 0) -> None:
    """Train the checkpoint `start` for so many minutes of a core, and write the average of its weights to `folder`."""
    torch.manual_seed(seed)
    run = Scales(start, seed)
    model = run.vlm.model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    step, losses, began = 0, [], time.process_time()
    while (done := (time.process_time() - began) / 60 / minutes) < 1:
        loss = run.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM) * min(1.0, 2 * (1 - done))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 1 - min(EMA, step / (step + 10)))
        losses.append(loss.item())
        if step % 100 == 0:
            print(json.dumps({"step": step, "loss": round(sum(losses) / len(losses), 4)}), flush=True)
            losses = []
    model.load_state_dict(average)
    export(
        "qwen", model, run.tokenizer, folder, f"demo-qwen, trained {step} steps further on images of several sizes.\n"
    )
