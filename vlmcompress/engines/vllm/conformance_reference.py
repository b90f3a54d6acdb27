"""The reference for vLLM's answers: transformers, one conversation at a time, with the same reducer attached.

Nothing is padded, nothing is cached between conversations, and no prompt is cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import torch
from PIL import Image
from torch import Tensor

from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.reduction import hooks as hf_hooks
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.block import CarriedReducer
from vlmcompress.utils.errors import UserError


@dataclass(frozen=True)
class Expected:
    """transformers' results for a conversation.

    Attributes:
        prompt: token ids that an engine should have, dropped visual tokens left out.
        kept: number of visual tokens left of each image, or tile where a family cuts images into tiles.
        tokens: greedy continuation, going on behind end tokens.
        first: log-probability of every token at the first step, `[vocabulary]`.
        positions: `[3, tokens that went through the model]`; three equal rows where a model has plain RoPE.
    """

    prompt: list[int]
    kept: list[int]
    tokens: list[int]
    first: Tensor
    positions: Tensor


class Reference:
    """A checkpoint in transformers."""

    def __init__(self, folder: Path, dtype: str):
        with models.quiet():
            model, info = models.open_model(folder, dtype=dtype, trust_remote_code=False)
        if lacking := sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]})):
            raise UserError(f"{folder} lacks {len(lacking)} tensors that the model needs, such as {lacking[0]}")
        processor = models.load_processor(folder)
        ends = model.generation_config.eos_token_id
        self.ends = {*(ends if isinstance(ends, list) else [ends]), processor.tokenizer.eos_token_id} - {None}
        model.generation_config.eos_token_id = None  # go on behind the end of an answer
        model.generation_config.pad_token_id = 0
        self.vlm = VLM(model.eval(), processor, models.spec_for(models.read_config(folder)), folder)

    @contextlib.contextmanager
    def reduced(self, carried: CarriedReducer | None) -> Iterator[None]:
        """Within the context, the reducer that a checkpoint carries is attached; None: no reducer is."""
        with self._attach(carried) if carried else contextlib.nullcontext() as attached:
            self._attached = attached
            yield

    def _attach(self, carried: CarriedReducer) -> hf_hooks.Attachment:
        chosen = scorer_file.known(self.vlm.model.config, carried.reducer, self.vlm.path)
        return hf_hooks.attach(self.vlm, chosen, counter=carried.count)

    def ask(self, messages: list[dict[str, Any]], tokens: int) -> Expected:
        """Continue a conversation by `tokens` greedily."""
        model: Any = self.vlm.model
        batch = self._encode(messages)
        positions: list[Tensor] = []
        text = model.get_submodule(self.vlm.spec.layers.rpartition(".")[0])
        hook = text.register_forward_pre_hook(
            lambda _, __, kwargs: positions.append(_positions(kwargs)), with_kwargs=True
        )
        if self._attached is not None:
            self._attached.seen = []
        try:
            with torch.inference_mode():
                output = model.generate(
                    **batch,
                    do_sample=False,
                    num_beams=1,
                    repetition_penalty=1.0,
                    no_repeat_ngram_size=0,
                    max_new_tokens=tokens,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
        finally:
            hook.remove()
        prompt = batch["input_ids"][0]
        keep, kept = torch.ones_like(prompt, dtype=torch.bool), []
        for unit in self._attached.seen if self._attached is not None else []:
            keep[unit.columns] = False
            keep[unit.columns[unit.reduction.anchor]] = True
            kept.append(len(unit.reduction.anchor))
        return Expected(
            prompt[keep].tolist(),
            kept,
            output.sequences[0, len(prompt) :].tolist(),
            output.logits[0][0].float().log_softmax(-1),
            torch.cat(positions, 1),
        )

    def _encode(self, messages: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Encode one conversation as the model's inputs."""
        conversation = [
            message | {"content": [_part(part) for part in _parts(message["content"])]} for message in messages
        ]
        inputs = self.vlm.processor.apply_chat_template(
            [conversation], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return dict(inputs.to(dtype=self.vlm.model.dtype))


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Convert a part of a message for transformers' processors: an image becomes a Pillow image."""
    if part["type"] != "image_url":
        return part
    with Image.open(unquote(urlparse(part["image_url"]["url"]).path)) as image:
        return {"type": "image", "image": image.convert("RGB")}


def _positions(kwargs: dict[str, Any]) -> Tensor:
    """Positions `[3, s]` of one call of the language model."""
    positions, cache = kwargs.get("position_ids"), kwargs.get("past_key_values")
    if positions is None:
        start = cache.get_seq_length() if cache is not None else 0
        positions = torch.arange(start, start + kwargs["inputs_embeds"].shape[1])[None]
    return (positions[-3:, 0] if positions.ndim == 3 else positions.expand(3, -1)).clone()
