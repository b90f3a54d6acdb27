"""A model's greedy answer to a sample's prompt, and its logits at the tokens of a sample's answer.

Only the last answer of a conversation counts; earlier ones are part of the prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmcompress.models import VLM
from vlmcompress.models.data.encode import ANSWER, Inputs
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
