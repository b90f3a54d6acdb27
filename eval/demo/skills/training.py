"""A demo model learns a skill: adapters of its decoder, from the skill's answers and, to forget nothing, the old families.

The tower stays; so do embeddings and head where they are one tensor, as in demo-smol, which knows English: the other demos
learned each word either to read or to write. The loss is the cross entropy of answer tokens. What is shipped is an average over
the last steps.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, AutoProcessor

from eval.demo.measure import answers, messages
from eval.demo.skills.watching import watch
from eval.demo.smol.adapter import adapt, adapters
from eval.demo.smol.training import Training
from eval.world.boxes import asked_boxes, box_rows
from eval.world.clips import asked_clips, clip_rows
from eval.world.describing import description_rows, descriptions
from eval.world.pages import asked_pages, page_rows
from eval.world.rows import VARIANTS, ask_several, images_of, sample_view
from eval.world.textual import ask_text
from eval.world.vocab import FAMILIES
from vlmcompress.evaluation.accuracy import transcription
from vlmcompress.evaluation.accuracy.grounding import correct, overlap
from vlmcompress.models.data.video import Video, arguments

EMA = 0.99
OLD = 0.15  # share of batches with questions of the old families

Row = tuple[list[Image.Image | Video], list[tuple[str, str]]]  # images or a video, questions with answers


def words(answer: str, expected: str) -> float:
    """The share of words that are right; 0 for another number of words."""
    a, b = np.array(answer.split()), np.array(expected.split())
    return float(np.mean(a == b)) if len(a) == len(b) else 0.0


@dataclass(frozen=True)
class Skill:
    """What is learned: scenes with questions and answers by split and variant, and how answers are validated.

    Attributes:
        drawn: (split, variant) -> scene and its questions with answers and what else belongs to them, without end.
        rows: (split, variant, number) -> rows to validate and to test on.
        tokens: most tokens of an answer.
        scores: name -> function of an answer and the expected one.
    """

    drawn: Callable[[str, str], Iterator]
    rows: Callable[[str, str, int], list[dict]]
    tokens: int
    scores: dict[str, Callable[[str, str], float | None]]


def _described(split: str, variant: str) -> Iterator:
    return ((scene, [turn]) for scene, *turn in descriptions(split, variant))


SKILLS = {
    "describe": Skill(_described, description_rows, 100, {"exact": lambda a, b: float(a == b), "words": words}),
    "boxes": Skill(asked_boxes, box_rows, 24, {"right": correct, "overlap": overlap}),
    "pages": Skill(
        asked_pages, page_rows, 40, {"exact": lambda a, b: float(a == b), "similarity": transcription.score}
    ),
    "clips": Skill(asked_clips, clip_rows, 8, {"exact": lambda a, b: float(a == b)}),
}


@dataclass
class Plan:
    """Settings of a training, from the command line."""

    skill: str
    folder: Path
    variant: str
    minutes: float
    rate: float = 2e-3
    batch: int = 8  # images
    seed: int = 0
    turns: int = 6  # most questions about an image
    validate_every: float = 240.0  # seconds
    rows: int = 60  # of validation
    start: Path | None = None  # adapters of another skill to begin with


class Teaching(Training):
    """State of one training."""

    def __init__(self, plan: Plan, state: Path):
        torch.manual_seed(plan.seed)
        self.plan, self.skill = plan, SKILLS[plan.skill]
        self.model = AutoModelForImageTextToText.from_pretrained(plan.folder, dtype=torch.float32).requires_grad_(False)
        self.processor = AutoProcessor.from_pretrained(plan.folder)
        if plan.skill == "clips":
            watch(self.model.config, self.processor)
        self.layers: nn.ModuleList = self.model.model.language_model.layers
        adapt(self.layers)
        learned = {
            f"{name}.{part}": getattr(module, part)
            for name, module in adapters(self.layers).items()
            for part in ("a", "b")
        }
        if not self.model.config.tie_word_embeddings:
            for name, module in (("embed", self.model.get_input_embeddings()), ("head", self.model.lm_head)):
                learned[name] = module.weight.requires_grad_(True)
        optimizer = torch.optim.AdamW(learned.values(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        super().__init__(learned, state, EMA, optimizer)
        self.resume(plan.start)

    def run(self) -> None:
        """Train until the plan's minutes are over, saving at every validation."""
        plan, recent = self.plan, list[float]()
        random = Random(f"{plan.seed}/{self.step}")
        scenes = islice(self.skill.drawn("train", plan.variant), self.step * plan.batch, None)
        last = validated = time.process_time()
        while self.spent < plan.minutes * 60:
            rows = self.old(random) if random.random() < OLD else self.new(scenes)
            loss = self.loss(rows)
            loss.backward()
            self.update(self.rate())
            recent.append(loss.item())
            now = time.process_time()
            self.spent, last = self.spent + now - last, now
            if now - validated > plan.validate_every:
                self.save()
                print(
                    json.dumps({"step": self.step, "loss": round(sum(recent) / len(recent), 4)} | self.validate()),
                    flush=True,
                )
                recent, last = [], time.process_time()
                validated = last
        self.save()

    def rate(self) -> float:
        """The learning rate: constant after a few steps, and falling in the second half of the time."""
        left = 1 - self.spent / 60 / self.plan.minutes
        return self.plan.rate * min(1.0, (self.step + 1) / 50) * min(1.0, 0.05 + left * 2)

    def new(self, scenes: Iterator) -> list[Row]:
        """A batch of the skill."""
        return [
            (
                [scene if isinstance(scene, Video) else Image.fromarray(scene.draw()[0])],
                [(question, answer) for question, answer, *_ in turns[: self.plan.turns]],
            )
            for scene, turns in islice(scenes, self.plan.batch)
        ]

    def old(self, random: Random) -> list[Row]:
        """A batch of questions of the frozen families, about fresh scenes."""
        rows: list[Row] = []
        while len(rows) < self.plan.batch:
            family = random.choice(FAMILIES)
            if family == "text":
                rows.append(([], [ask_text(random)]))
                continue
            view = sample_view(random, family, random.choice(VARIANTS[self.plan.variant]), "train")
            if turns := ask_several(random, view, family, self.plan.turns):
                rows.append(([Image.fromarray(image.draw()[0]) for image in images_of(view)], turns))
        return rows

    def loss(self, rows: list[Row]) -> Tensor:
        """The cross entropy of the rows' answer tokens, each token alike."""
        inputs, labels = self.encoded(rows)
        hidden = self.model.model(**inputs, use_cache=False).last_hidden_state
        learn = labels[:, 1:] != -100
        return F.cross_entropy(self.model.lm_head(hidden[:, :-1][learn]).float(), labels[:, 1:][learn])

    def encoded(self, rows: list[Row]) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs padded on the right, and labels `[rows, length]` that are -100 but at answer tokens.

        A row holds its images once and all questions after them, each at the positions and with the context that it has alone.
        """
        tokenizer, template, inner = self.processor.tokenizer, self.processor.apply_chat_template, self.model.model
        heads, tails = [], []
        for pictures, turns in rows:
            [turn] = messages({"image": [], "question": "\0"})
            parts = [{"type": "video" if isinstance(picture, Video) else "image"} for picture in pictures]
            turn["content"] = [*parts, *turn["content"]]
            head, rest = template([turn], add_generation_prompt=True, tokenize=False).split("\0")
            start = " " if self.plan.variant == "llava" and "assistant\n" not in rest else ""
            heads.append(head.rstrip(" "))
            before = head[len(heads[-1]) :]  # a space belongs to the word after it
            ends = [f"{start}{answer}{tokenizer.eos_token}" for _, answer in turns]
            texts = [f"{before}{question}{rest}{end}" for (question, _), end in zip(turns, ends, strict=True)]
            tails.append(list(zip(*(tokenizer(part)["input_ids"] for part in (texts, ends)), strict=True)))
        media = [picture for pictures, _ in rows for picture in pictures]
        images = [picture for picture in media if not isinstance(picture, Video)]
        films = [picture.frames(self.processor) for picture in media if isinstance(picture, Video)]
        options = {"padding": True, "padding_side": "right", "return_tensors": "pt", "add_special_tokens": False}
        videos = [frames for frames, _ in films]
        inputs = dict(
            self.processor(text=heads, images=images or None, videos=videos or None, **arguments(films), **options)
        )
        mask, kinds = inputs.pop("attention_mask"), inputs.pop("mm_token_type_ids", None)
        if self.plan.variant == "qwen":
            grids = {name: inputs.get(name) for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
            places = inner.get_rope_index(inputs["input_ids"], kinds, **grids, attention_mask=mask)[0]
        else:
            places = torch.arange(mask.shape[1]).expand(mask.shape)
        lengths = mask.sum(1).tolist()
        longest = max(n + sum(len(ids) for ids, _ in tail) for n, tail in zip(lengths, tails, strict=True))
        added = (0, longest - mask.shape[1])
        ids, places = F.pad(inputs["input_ids"], added, value=tokenizer.pad_token_id), F.pad(places, added)
        labels = torch.full_like(ids, -100)
        part = torch.full_like(ids, -1)  # 0: the images, 1: the first question with its answer, and so on
        for row, (end, tail) in enumerate(zip(lengths, tails, strict=True)):
            part[row, :end] = 0
            first = places[..., row, end - 1].max() + 1
            # After a video transformers 5.17 counts on from a frame's rows and columns, vLLM from all that the video has.
            if films and self.step % 2:
                first = places[..., row, :end].max() + 2
                places[..., row, end - 1] = first - 1
            for number, (text, answer) in enumerate(tail, 1):
                begin, end = end, end + len(text)
                ids[row, begin:end] = torch.tensor(text)
                labels[row, end - len(answer) : end] = torch.tensor(answer)
                places[..., row, begin:end] = first + torch.arange(len(text))
                part[row, begin:end] = number
        visible = (part[:, None] == 0) | (part[:, None] == part[..., None])
        return inputs | {"input_ids": ids, "attention_mask": visible.tril()[:, None], "position_ids": places}, labels

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The mean of each of the skill's scores on validation answers."""
        rows = self.skill.rows("validation", self.plan.variant, self.plan.rows)
        texts = answers(self.model, self.processor, rows, tokens=self.skill.tokens)
        pairs = [(text, row["answer"]) for text, row in zip(texts, rows, strict=True)]
        return {
            name: round(float(np.mean([score(*pair) or 0.0 for pair in pairs])), 4)
            for name, score in self.skill.scores.items()
        }
