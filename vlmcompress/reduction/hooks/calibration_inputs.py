"""Convert calibration samples to the inputs of a decoder after a reducer.

Encoder, projector and reducer run once over each sample. The inputs that the language model would then get replace the
pixels, and `Decoder`, a model of the decoder alone, replaces the whole model. It has the same modules under the same
names, so every pass over the blocks (statistics, gradients, searches) works on it as on the whole model, and sees the
tokens that will be served.

The reducer runs on the prompt only: a query-aware one must not see the answer. The answer's tokens are appended to the reduced
prompt, as in generation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.models.data.encode import ANSWER, VISION, Inputs
from vlmcompress.models.devices import accelerated, float_products
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks import Attachment, attach
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, silent


class Decoder(PreTrainedModel):
    """The language model and the head of a vision-language model: the same modules, under the same names."""

    def __init__(self, vlm: VLM):
        nn.Module.__init__(self)  # PreTrainedModel.__init__ would change the config, which belongs to the whole model
        self.config = vlm.model.config
        self.text, self.head = vlm.spec.layers.rpartition(".")[0], vlm.spec.lm_head
        outer, inner = self.text.split(".")
        self.add_module(outer, nn.ModuleDict({inner: vlm.model.get_submodule(self.text)}))
        self.add_module(self.head, vlm.model.get_submodule(self.head))

    @property
    def base_model(self) -> Any:
        """The language model, whose output the head reads."""
        return self.get_submodule(self.text)

    def get_input_embeddings(self) -> Any:
        """The input embeddings of the language model."""
        return self.get_submodule(self.text).get_input_embeddings()  # type: ignore[operator]

    def get_output_embeddings(self) -> Any:
        """The output head."""
        return self.get_submodule(self.head)

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        input_ids: Tensor | None = None,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutputWithPast:
        """Compute logits of the tokens `logits_to_keep`, as the whole model does. `input_ids` are informational only."""
        deep = {"visual_pos_masks": visual_pos_masks, "deepstack_visual_embeds": deepstack_visual_embeds}
        hidden = self.get_submodule(self.text)(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **{name: value for name, value in deep.items() if value is not None},
        ).last_hidden_state
        index = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.get_submodule(self.head)(hidden[:, index]))


def decoder(vlm: VLM) -> VLM:
    """A `VLM` with only the decoder of `vlm`, for samples from `reduced`."""
    return replace(vlm, model=Decoder(vlm))


@torch.no_grad()
def reduced(vlm: VLM, samples: Sequence[Inputs], chosen: ReducerChoice, progress: Progress = silent) -> list[Inputs]:
    """Run samples from `encode` through everything before the decoder, with a reducer attached.

    Args:
        chosen: a reducer of a stage before the language model.
        progress: called with (label, done, total).

    Returns:
        Inputs of `Decoder`, one sample each, with `modality [1, tokens]` of the remaining tokens. All have the same keys.
    """
    shortened = []
    blocks = models.decoder_layers(vlm.model, vlm.spec)
    with accelerated(vlm.model, blocks) as device, attach(vlm, chosen) as attached:
        for index, sample in enumerate(samples):
            shorter = _one(vlm, attached, {name: value.to(device) for name, value in sample.items()})
            shortened.append({name: value.cpu() for name, value in shorter.items()})
            progress("reducing visual tokens", index + 1, len(samples))
    return _alike(shortened)


class _Reached(Exception):
    """Raised to end a forward pass at the language model, as only its arguments are needed."""


def _prompt(vlm: VLM, attached: Attachment, inputs: Inputs) -> dict[str, Any]:
    """Run everything before the language model on one prompt of `n` tokens, and return the arguments of that, by name.

    inputs_embeds: `[1, s, d]`, of the `s` tokens that are left.
    attention_mask: `[1, s]`, ones where attention may look.
    position_ids: `[1, s]` or, with M-RoPE, `[3 or 4, 1, s]`; those of the full prompt.
    columns: `[s]` int64, columns of the prompt's tokens that are left, ascending.
    visual_pos_masks, deepstack_visual_embeds: features for the first layers, in families that have them.
    """
    arguments: dict[str, Any] = {}

    def reached(_module: Any, _args: tuple, kwargs: dict[str, Any]) -> None:
        arguments.update({name: value for name, value in kwargs.items() if value is not None})
        if attached._new is not None:
            arguments["columns"] = attached._new.columns[0]
        raise _Reached

    hook = attached.text.register_forward_pre_hook(reached, with_kwargs=True)  # after the reducer's own hooks
    try:
        with contextlib.suppress(_Reached), float_products(vlm.model):
            vlm.model(**inputs, use_cache=False)
    finally:
        hook.remove()
    every = torch.arange(arguments["inputs_embeds"].shape[1], device=arguments["inputs_embeds"].device)
    whole = {"attention_mask": torch.ones_like(every)[None], "position_ids": every[None], "columns": every}
    return whole | arguments


def _one(vlm: VLM, attached: Attachment, batch: Inputs) -> Inputs:
    """Inputs of one sample: the reduced prompt, followed by the answer."""
    modality, ids = batch["modality"], batch["input_ids"]
    length, cut = ids.shape[1], prompt_length(batch["modality"][0])
    inputs = {
        name: value[:, :cut] if value.shape[:2] == (1, length) else value
        for name, value in batch.items()
        if name != "modality"
    }
    if (mask := inputs.get("attention_mask")) is not None and not mask.all():
        raise UserError("calibration samples after a reducer must not be padded; encode them one by one")
    prompt, tail = _prompt(vlm, attached, inputs), length - cut
    mask, positions, columns = prompt["attention_mask"], prompt["position_ids"], prompt["columns"]
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UserError(
            f"{vlm.spec.family} attends to an image's tokens in both directions, and is not calibrated after a reducer"
            " yet; use a scheme without calibration data"
        )
    # The answer goes on from the prompt's last position, which no reducer changes.
    answer = ids[:, cut:]
    after = positions[..., -1:] + torch.arange(1, tail + 1, device=ids.device)
    result = {
        "input_ids": torch.cat([ids[:, columns], answer], 1),
        "inputs_embeds": torch.cat([prompt["inputs_embeds"], vlm.model.get_input_embeddings()(answer)], 1),
        "attention_mask": torch.cat([mask, mask.new_ones(1, tail)], 1),
        "position_ids": torch.cat([positions, after], -1),
        "modality": torch.cat([modality[:, columns], modality[:, cut:]], 1),
    }
    if levels := prompt.get("deepstack_visual_embeds"):
        where = prompt["visual_pos_masks"]
        result["visual_pos_masks"] = torch.cat([where, where.new_zeros(1, tail)], 1)
        result["deepstack_visual_embeds"] = torch.stack(list(levels))
    return result


def prompt_length(modality: Tensor) -> int:
    """Number of tokens before a sample's last answer, from `modality [n]`; all tokens if an image follows that answer."""
    answered = (modality == ANSWER).nonzero().flatten()
    if not len(answered):
        return len(modality)
    # Answers of several turns are runs of answer tokens; the last run begins after the last gap.
    gaps = (answered.diff() > 1).nonzero().flatten()
    first = int(answered[gaps[-1] + 1] if len(gaps) else answered[0])  # the prompt's last token predicts the answer
    return len(modality) if (modality[first:] == VISION).any() else first + 1


def _alike(samples: list[Inputs]) -> list[Inputs]:
    """Give all samples the same keys: one without images gets empty visual features for the first layers."""
    deep = next((sample["deepstack_visual_embeds"] for sample in samples if "deepstack_visual_embeds" in sample), None)
    if deep is None:
        return samples
    return [
        {
            "visual_pos_masks": torch.zeros_like(sample["modality"], dtype=torch.bool),
            "deepstack_visual_embeds": deep[:, :0],
        }
        | sample
        for sample in samples
    ]
