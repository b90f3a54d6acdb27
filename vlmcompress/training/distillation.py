"""Logits at a sample's answer tokens, of the teacher with all visual tokens and of the student after a reducer.

The teacher runs a whole sample at once. The student first runs the prompt, which is all its reducer sees, and then the
answer's tokens with the KV cache of the prompt, as in generation: methods that read the text, or decide within the language
model, never see the answer. The graph goes through both runs and the cache. Only the last answer of a conversation counts;
earlier ones are part of the prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vlmcompress.models import VLM
from vlmcompress.models.data.encode import ANSWER, PIXELS, Inputs
from vlmcompress.models.devices import float_products
from vlmcompress.reduction.hooks.calibration_inputs import prompt_length


def answer_tokens(batch: Inputs) -> tuple[int, int]:
    """For a sample from `encode`: the length of its prompt, and the number of predicted tokens of its last answer, the first
    of which is predicted at the prompt's last token; 0 without an answer."""
    modality = batch["modality"][0]
    cut = prompt_length(modality)
    return cut, int((modality[cut - 1 :] == ANSWER).sum()) if cut < len(modality) else 0


def whole_logits(vlm: VLM, batch: Inputs) -> Tensor:
    """Logits `[answer tokens, vocabulary]` of one sample that has an answer, which runs together with the prompt: of the
    teacher, or with gates (`hooks.gated`), which depend on the image only."""
    cut, count = answer_tokens(batch)
    # Position t predicts token t + 1: logits from the last token of the prompt to the last but one of the answer.
    columns = torch.arange(cut - 1, cut - 1 + count, device=vlm.model.device)
    with float_products(vlm.model):
        return vlm.model(**on_model_device(vlm, batch), use_cache=False, logits_to_keep=columns).logits[0]


def student_logits(vlm: VLM, batch: Inputs) -> Tensor:
    """Logits `[answer tokens, vocabulary]` of the model with its attached reducer, for one sample that has an answer.

    For a backward pass call it within `graph`.
    """
    cut, count = answer_tokens(batch)
    inputs = on_model_device(vlm, batch)
    ids = inputs["input_ids"]
    with float_products(vlm.model):
        # inputs with an entry per token are cut after the prompt; pixels and image sizes are not
        prompt = {name: value[:, :cut] if value.shape[:2] == ids.shape else value for name, value in inputs.items()}
        first = vlm.model(**prompt, use_cache=True, logits_to_keep=1)
        if count == 1:
            return first.logits[0]
        end = cut - 1 + count
        kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(ids[:, :end])}
        if vlm.spec.images.positions == "mrope":
            base: Any = vlm.model.get_submodule(vlm.spec.layers.split(".")[0])
            ahead = base.rope_deltas if PIXELS & inputs.keys() else 0  # the model does not reset it without images
            kwargs["position_ids"] = (torch.arange(cut, end, device=ids.device)[None] + ahead)[None].expand(3, -1, -1)
        rest = vlm.model(input_ids=ids[:, cut:end], past_key_values=first.past_key_values, use_cache=True, **kwargs)
    return torch.cat([first.logits, rest.logits], 1)[0]


@contextlib.contextmanager
def graph(vlm: VLM) -> Iterator[None]:
    """Within the context a graph may go through the model's caches. Recurrent states are written in place, so they are copied
    first, which takes time."""
    copied = torch.autograd.graph.allow_mutation_on_saved_tensors if vlm.spec.mixed_blocks else contextlib.nullcontext
    with torch.enable_grad(), copied():
        yield


@torch.no_grad()
def greedy_answer(vlm: VLM, batch: Inputs, most: int) -> str:
    """The model's greedy answer to a prompt from `encode_prompt`, of at most `most` tokens, as text."""
    inputs = on_model_device(vlm, batch)
    with float_products(vlm.model):
        tokens = vlm.model.generate(  # type: ignore[operator]
            **inputs, do_sample=False, num_beams=1, max_new_tokens=most, pad_token_id=0
        )
    answer = tokens[0, inputs["input_ids"].shape[1] :]
    return vlm.processor.tokenizer.decode(answer, skip_special_tokens=True).strip()


def on_model_device(vlm: VLM, batch: Inputs) -> Inputs:
    """The inputs on the model's device, floating ones in its dtype."""
    device, dtype = vlm.model.device, vlm.model.dtype
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in batch.items()
        if name != "modality"
    }
