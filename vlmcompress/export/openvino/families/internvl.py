"""InternVL 2.5, 3 and 3.5; in the pipeline `internvl_chat`, the original name of its checkpoints on the Hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from vlmcompress.export.openvino.spec import BATCH, Graph, OpenvinoFamily, Port, decoder_problems

TILES = {"min_patches": 1, "max_patches": 12}  # per image; fixed in the pipeline


class Features(nn.Module):
    """The tower and the projector, which joins neighbouring patches: tiles to `[tiles, tokens, width]`."""

    def __init__(self, model: Any):
        super().__init__()
        config = model.config
        self.tower, self.projector = model.model.vision_tower, model.model.multi_modal_projector
        self.layer = config.vision_feature_layer
        self.begin = 1 if config.vision_feature_select_strategy == "default" else 0
        self.side = config.vision_config.image_size[0] // config.vision_config.patch_size[0]
        self.joined = round(1 / config.downsample_ratio)

    def forward(self, pixel_values: Tensor) -> Tensor:
        output = self.tower(pixel_values, output_hidden_states=self.layer != -1)
        features = output.last_hidden_state if self.layer == -1 else output.hidden_states[self.layer]
        features = features[:, self.begin :]
        few, channels = self.side // self.joined, features.shape[-1] * self.joined
        wide = features.reshape(-1, self.side, few, channels).transpose(1, 2)
        both = wide.reshape(-1, few, few, channels * self.joined).transpose(1, 2)
        return self.projector(both.reshape(-1, few * few, channels * self.joined))


def tower(model: Any) -> dict[str, Graph]:
    """The tower with the projector."""
    vision = model.config.vision_config
    pixels = Port("pixel_values", (BATCH, vision.num_channels, *vision.image_size))
    return {"vision_embeddings_model": Graph(Features(model), (pixels,))}


def images(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of images with the side of a tile under the pipeline's name for it."""
    return {**settings, "size": {"shortest_edge": settings["size"]["height"]}}


def settings(read: Callable[[str], Tensor]) -> dict[str, Any]:
    """The name of the family in the pipeline."""
    return {"model_type": "internvl_chat"}


FAMILY = OpenvinoFamily(
    tower,
    "<IMG_CONTEXT>",
    tag="<image>",
    images=images,
    fixed_images=TILES,
    settings=settings,
    problems=decoder_problems,
)
