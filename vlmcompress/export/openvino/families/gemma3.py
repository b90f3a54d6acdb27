"""Gemma 3: tokens of an image see each other, in blocks of sliding and of full attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.export.openvino.spec import BATCH, NEW, Decoder, Graph, OpenvinoFamily, Port, decoder_problems


class Features(nn.Module):
    """The tower and the projector: images to `[images, tokens, width]`."""

    def __init__(self, model: Any):
        super().__init__()
        self.tower, self.projector = model.model.vision_tower, model.model.multi_modal_projector

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.projector(self.tower(pixel_values).last_hidden_state)


class Gemma3Decoder(Decoder):
    """The decoder, with masks for both kinds of attention; `token_type_ids` is 1 for tokens of images.

    For paged attention, OpenVINO creates its own masks from these inputs and from the window, which it recognizes by the nodes
    of a mask. So `windowed` has the nodes in the expected order (`gptoss_gemma3_sliding_window_pattern` in
    `paged_attention/state_management_pattern.cpp`).
    """

    @property
    def extra(self) -> tuple[Port, ...]:
        return (Port("token_type_ids", (BATCH, NEW), (0, 1), torch.int64),)

    def arguments(self, rows: Tensor, columns: Tensor, present: Tensor, *extra: Tensor) -> dict[str, Any]:
        (types,) = extra
        visible = (columns <= rows) | same_image(types, columns.shape[-1])
        window = self.text.sliding_window
        return {
            "attention_mask": {
                "full_attention": visible & present,
                "sliding_attention": windowed(rows, columns, visible, present, window),
            }
        }


def same_image(types: Tensor, total: int) -> Tensor:
    """Whether a token is in the same image as a new token, bool `[batch, 1, new, total]`."""
    image = types == 1
    first = image & ~torch.cat((torch.zeros_like(image[:, :1]), image[:, :-1]), 1)
    number = torch.where(image, first.long().cumsum(1), 0)
    past = torch.zeros(number.shape[0], total - number.shape[1], dtype=torch.long)
    return ((number[:, :, None] == torch.cat((past, number), 1)[:, None]) & image[:, :, None])[:, None]


def windowed(rows: Tensor, columns: Tensor, visible: Tensor, present: Tensor, window: int) -> Tensor:
    """The additive mask for attention to the last `window` visible tokens."""
    every = torch.ones((), dtype=torch.bool)
    near = every & (columns > rows + (-window))
    allowed = (every & (near & visible)) & present
    allowed = allowed.expand(present.shape[0], -1, -1, -1)
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)


def tower(model: Any) -> dict[str, Graph]:
    """The tower with the projector."""
    vision = model.config.vision_config
    pixels = Port("pixel_values", (BATCH, vision.num_channels, vision.image_size, vision.image_size))
    return {"vision_embeddings_model": Graph(Features(model), (pixels,))}


def problems(config: Mapping[str, Any]) -> list[str]:
    """Reasons why the model cannot be written."""
    text = {**config["text_config"], "sliding_window": None}
    text["layer_types"] = [kind for kind in text["layer_types"] if kind != "sliding_attention"]
    problems = decoder_problems({"text_config": text})
    if config["text_config"].get("final_logit_softcapping") or config["text_config"].get("attn_logit_softcapping"):
        problems.append("soft caps of logits are not written to OpenVINO for this family")
    return problems


FAMILY = OpenvinoFamily(tower, "<start_of_image>", decoder=Gemma3Decoder, problems=problems)
