"""LLaVA-1.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.export.openvino.spec import BATCH, Graph, OpenvinoFamily, Port, decoder_problems


class Features(nn.Module):
    """The tower, whose features of one layer or of several go through the projector: images to `[images, tokens, width]`."""

    def __init__(self, model: Any):
        super().__init__()
        self.tower, self.projector = model.model.vision_tower, model.model.multi_modal_projector
        layers = model.config.vision_feature_layer
        self.layers = [layers] if isinstance(layers, int) else layers
        self.begin = 1 if model.config.vision_feature_select_strategy == "default" else 0

    def forward(self, pixel_values: Tensor) -> Tensor:
        states = self.tower(pixel_values, output_hidden_states=True).hidden_states
        return self.projector(torch.cat([states[layer][:, self.begin :] for layer in self.layers], -1))


def tower(model: Any) -> dict[str, Graph]:
    """The tower with the projector."""
    vision = model.config.vision_config
    pixels = Port("pixel_values", (BATCH, vision.num_channels, vision.image_size, vision.image_size))
    return {"vision_embeddings_model": Graph(Features(model), (pixels,))}


def images(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The image settings for the pipeline, which scales the shorter side and crops the center, as CLIP does.

    It always does so: for processors that stretch images instead, only square images give the same result.
    """
    size, crop = settings["size"], settings.get("crop_size") or {}
    if "shortest_edge" not in size:
        size, crop = {"shortest_edge": min(size["height"], size["width"])}, size
    return {**settings, "size": size, "crop_size": crop}


FAMILY = OpenvinoFamily(tower, "<image>", suffix="\n", images=images, problems=decoder_problems)
