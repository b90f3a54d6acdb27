"""Ask many questions about an image for the price of one: what a reducer leaves of it is run once, and its cache serves
all.

`SharedAsker` finds what `reduced_answers.Asker` finds (tests/scripts/test_bench_reducers.py), for methods that don't
look at the question and drop their tokens before the language model; others are handed to it. The questions about an
image and their answers are one sequence behind its cache, each masked from the others, at the positions that it would
have alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from reduced_answers import Asker, Found, encoder_untouched
from torch import Tensor

from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks import attach


class SharedAsker(Asker):
    """A model and questions for it, each with one image that stands before its words."""

    @torch.no_grad()
    def ask(self, chosen: ReducerChoice | None) -> Found:
        if chosen and not shareable(chosen):
            return super().ask(chosen)
        questions = self.questions.questions
        exact = torch.zeros(len(questions), dtype=torch.bool)
        after = torch.zeros(len(questions), dtype=torch.int64)
        for image in range(len(self.questions.images)):
            about = torch.tensor([k for k, question in enumerate(questions) if question.images == (image,)])
            exact[about], after[about] = self._about(image, about.tolist(), chosen)
        layers = self.vlm.model.config.get_text_config().num_hidden_layers
        return Found(exact, self.visual(), after, layers * after)

    def _about(self, image: int, numbers: list[int], chosen: ReducerChoice | None) -> tuple[Tensor, int]:
        """Whether the answers to the questions about an image are right, `[questions]` bool, and its tokens that are left."""
        token = getattr(self.vlm.model.config, self.vlm.spec.image_token)
        prompts = [self.questions.questions[number].tokens["input_ids"][0] for number in numbers]
        end = int((prompts[0] == token).nonzero()[-1]) + 1
        prefix, self._shown = prompts[0][:end], [image]
        with contextlib.ExitStack() as stack:
            attached = stack.enter_context(attach(self.vlm, chosen)) if chosen else None
            if chosen is None or encoder_untouched(chosen.module):
                stack.enter_context(self._remembered())
            cache = self.vlm.model(
                input_ids=prefix[None], **self.questions.images[image], use_cache=True, logits_to_keep=1
            ).past_key_values
        left = cache.get_seq_length() - int((prefix != token).sum())
        del attached
        tails = [prompt[end:] for prompt in prompts]
        answers = [self.questions.questions[number].answer for number in numbers]
        return self._continued(cache, end, tails, answers), left

    def _continued(self, cache: Any, start: int, tails: list[Tensor], answers: list[Tensor]) -> Tensor:
        """Whether each answer's tokens are the most likely ones behind its tail, `[questions]` bool."""
        parts = [torch.cat([tail, answer[:-1]]) for tail, answer in zip(tails, answers, strict=True)]
        owner = torch.cat([torch.full((len(part),), k) for k, part in enumerate(parts)])
        positions = torch.cat([start + torch.arange(len(part)) for part in parts])
        visible = (owner[:, None] == owner[None]) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
        shown = torch.cat([torch.ones(len(owner), cache.get_seq_length(), dtype=torch.bool), visible], 1)
        mask = torch.zeros(shown.shape).masked_fill_(~shown, -torch.inf)[None, None]
        text = self.vlm.model.get_submodule(self.vlm.spec.layers.rpartition(".")[0])
        hidden = text(
            input_ids=torch.cat(parts)[None], attention_mask=mask, position_ids=positions[None],
            past_key_values=cache, use_cache=True,
        ).last_hidden_state[0]  # fmt: skip
        right, at = [], 0
        for tail, answer in zip(tails, answers, strict=True):
            rows = hidden[at + len(tail) - 1 : at + len(tail) - 1 + len(answer)]
            right.append(bool((self.vlm.model.lm_head(rows).argmax(-1) == answer).all()))
            at += len(tail) + len(answer) - 1
        return torch.tensor(right)


def shareable(chosen: ReducerChoice) -> bool:
    """Whether the method gives every question about an image the same tokens, in all blocks."""
    return chosen.module.STAGE != "llm" and not chosen.asks
