"""Test exactly whether a reduced model's greedy answers are the reference answers, thousands of questions in a minute.

Greedy decoding gives the reference answer if and only if, with the answer as input, each of its tokens and the one that ends it
is the most likely one. `exact` therefore runs the prompt through the model with the reducer attached, as `generate` does first,
and then the answer in one more step on the cache. The reducer sees the prompt alone, so that methods which look at the
question or at the last token never see the answer.

Prompts of one length share a batch, so nothing is padded. Encoded images are kept for reducers that leave the encoder alone
(`encoder_untouched`). Weights are those of the checkpoint (BF16 values), arithmetic is float32.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vlmcompress.models import VLM
from vlmcompress.models.data import Sample, encode
from vlmcompress.models.data.encode import ANSWER
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.methods import Reducer
from vlmcompress.reduction.support import needs_encoder

PER_BATCH = 48


@dataclass(frozen=True)
class Question:
    """A question. `tokens`: the prompt's tensors with a column a token, `[1, tokens]`; `answer [n]`: ids of the answer
    and its end; `images`: numbers of its images among `Questions.images`."""

    tokens: dict[str, Tensor]
    answer: Tensor
    images: tuple[int, ...]


@dataclass(frozen=True)
class Questions:
    """Questions about images, each image kept once with its own rows of the processor's tensors."""

    questions: list[Question]
    images: list[dict[str, Tensor]]

    def batches(self, stepwise: bool) -> list[list[int]]:
        """Batches of numbers of questions whose prompts (if `stepwise`, and answers) have one length, at most `PER_BATCH`."""
        alike: dict[tuple[int, int], list[int]] = {}
        for number, question in enumerate(self.questions):
            length = question.tokens["input_ids"].shape[1], len(question.answer) if stepwise else 0
            alike.setdefault(length, []).append(number)
        return [same[at : at + PER_BATCH] for same in alike.values() for at in range(0, len(same), PER_BATCH)]


@dataclass(frozen=True)
class Found:
    """Results by question: whether its answer is right, `exact [questions]` bool, and its number of visual tokens in the
    prompt, in the end after the reducer, and in all blocks' caches together, `before`, `after`, `held [questions]` int64.
    """

    exact: Tensor
    before: Tensor
    after: Tensor
    held: Tensor


def prepare(vlm: VLM, samples: Sequence[Sample]) -> Questions:
    """Encode samples that have images and an answer: their tokens and images."""
    numbers: dict[bytes, int] = {}
    questions, images = [], []
    for sample in samples:
        (inputs,) = encode([sample], vlm)
        where = (inputs.pop("modality")[0] == ANSWER).nonzero().squeeze(1)
        ids = inputs["input_ids"]
        inputs.pop("attention_mask", None)
        tokens = {name: value[:, : where[0] + 1] for name, value in inputs.items() if value.shape == ids.shape}
        image_numbers = []
        for image in _each({name: value for name, value in inputs.items() if name not in tokens}):
            name = hashlib.sha256(b"".join(value.numpy().tobytes() for value in image.values())).digest()
            if name not in numbers:
                numbers[name] = len(images)
                images.append(image)
            image_numbers.append(numbers[name])
        questions.append(Question(tokens, ids[0, where + 1], tuple(image_numbers)))
    return Questions(questions, images)


def _each(inputs: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Split the processor's tensors by image: a row an image, or in the Qwen family `t * h * w` rows of patches."""
    grids = inputs.get("image_grid_thw")
    if grids is None:
        for number in range(len(inputs["pixel_values"])):
            yield {name: value[number : number + 1].clone() for name, value in inputs.items()}
        return
    start = 0
    for number, rows in enumerate(grids.prod(-1).tolist()):
        pixels = inputs["pixel_values"][start : start + rows].clone()
        yield {"pixel_values": pixels, "image_grid_thw": grids[number : number + 1].clone()}
        start += rows


class Asker:
    """A model and questions for it. The model's weights become float32."""

    def __init__(self, vlm: VLM, questions: Questions):
        self.vlm, self.questions = vlm, questions
        self._base: Any = vlm.model.float().get_submodule(vlm.spec.layers.split(".")[0])
        self._features: dict[int, Tensor] = {}  # image -> its features as the language model gets them
        self._shown: list[int] = []  # numbers of the images of the batch that runs

    @torch.no_grad()
    def ask(self, chosen: ReducerChoice | None) -> Found:
        """Ask all questions, with a reducer or without (None)."""
        questions = self.questions.questions
        exact = torch.zeros(len(questions), dtype=torch.bool)
        before, after, held = self.visual(), *torch.zeros(2, len(questions), dtype=torch.int64)
        layers = self.vlm.model.config.get_text_config().num_hidden_layers
        # A method that drops tokens from step to step needs an answer's tokens one by one.
        stepwise = chosen is not None and chosen.reducer.STAGE == "llm" and chosen.reducer.COUNT == "adaptive"
        with contextlib.ExitStack() as stack:
            attached = stack.enter_context(attach(self.vlm, chosen)) if chosen else None
            if chosen is None or encoder_untouched(chosen.reducer):
                stack.enter_context(self._remembered())
            for batch in self.questions.batches(stepwise):
                index = torch.tensor(batch)
                exact[index] = self._exact(batch, stepwise)
                dropped = torch.zeros(layers, len(batch), dtype=torch.int64)
                for first, units in attached.stages if attached else ():
                    dropped[first:] = 0
                    for unit in units:
                        dropped[first:, unit.row] += len(unit.columns) - len(unit.reduction.anchor)
                after[index] = before[index] - dropped[-1]
                held[index] = layers * before[index] - dropped.sum(0)
        return Found(exact, before, after, held)

    def visual(self) -> Tensor:
        """Number of visual tokens in the prompt of each question, `[questions]` int64."""
        token = getattr(self.vlm.model.config, self.vlm.spec.image_token)
        return torch.stack([(question.tokens["input_ids"] == token).sum() for question in self.questions.questions])

    def _exact(self, batch: Sequence[int], stepwise: bool) -> Tensor:
        """Test for prompts of one length whether their answers are right, `[batch]` bool."""
        questions = [self.questions.questions[number] for number in batch]
        self._shown = [image for question in questions for image in question.images]
        images = [self.questions.images[image] for image in self._shown]
        inputs = {name: torch.cat([question.tokens[name] for question in questions]) for name in questions[0].tokens}
        inputs |= {name: torch.cat([image[name] for image in images]) for name in images[0]}
        labels = torch.nn.utils.rnn.pad_sequence(
            [question.answer for question in questions], batch_first=True, padding_value=-1
        )
        out = self.vlm.model(**inputs, use_cache=True, logits_to_keep=1)
        predicted, answers = (
            [out.logits.argmax(-1)],
            labels[:, :-1].clamp(min=0),
        )  # tokens after an answer's end are not read
        for step in answers.split(1 if stepwise else max(1, answers.shape[1]), 1):
            if step.shape[1]:
                out = self.vlm.model(input_ids=step, past_key_values=out.past_key_values, use_cache=True)
                predicted.append(out.logits.argmax(-1))
        return ((torch.cat(predicted, 1) == labels) | (labels < 0)).all(1)

    @contextlib.contextmanager
    def _remembered(self) -> Iterator[None]:
        """Within the context, the encoder runs once for each image, and not again for later reducers."""
        encoder = self._base.get_image_features

        def remembered(*args: Any, **kwargs: Any) -> Any:
            if any(image not in self._features for image in self._shown):
                rows = encoder(*args, **kwargs).pooler_output
                self._features |= dict(zip(self._shown, rows, strict=True))
            return SimpleNamespace(pooler_output=[self._features[image] for image in self._shown])

        self._base.get_image_features = remembered
        try:
            yield
        finally:
            del self._base.get_image_features


def encoder_untouched(reducer: Reducer) -> bool:
    """Whether the method neither changes what the encoder and the projector compute nor reads it on the way."""
    return reducer.STAGE == "llm" or (reducer.STAGE == "projected" and not needs_encoder(reducer))
