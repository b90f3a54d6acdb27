"""Towers of the Qwen-VL families: a graph that embeds patches, and one for the rest up to the language model.

Between the two, the pipeline computes what depends on image sizes: rotary angles, attention masks, the order of windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from vlmcompress.export.openvino.spec import Graph, Port, decoder_problems

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PATCHES = 8  # in the trace


class Blocks(nn.Module):
    """A tower's blocks and merger, on patches `[n, width]`, with an attention mask `[1, n, n]` and angles `[n, d]`.

    Returns `[visual tokens, width of the decoder]`.
    """

    def __init__(self, tower: Any):
        super().__init__()
        self.tower = tower

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Tensor) -> Any:
        *_, hidden = self.blocks(hidden_states, [attention_mask] * len(self.tower.blocks), rotary_pos_emb)
        return self.tower.merger(hidden)

    def blocks(self, hidden: Tensor, masks: list[Tensor], angles: Tensor) -> Iterator[Tensor]:
        """Yield the output of each block."""
        angles = torch.cat((angles, angles), -1).unsqueeze(1)
        for block, mask in zip(self.tower.blocks, masks, strict=True):
            hidden = hidden + attend(block.attn, block.norm1(hidden), mask, angles.cos(), angles.sin())
            hidden = hidden + block.mlp(block.norm2(hidden))
            yield hidden


def attend(attention: Any, hidden: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A tower's attention with a mask instead of image lengths."""
    patches = hidden.shape[0]
    q, k, v = attention.qkv(hidden).reshape(patches, 3, attention.num_heads, -1).unbind(1)  # [patches, heads, channels]
    q, k = (part * cos + rotated(part) * sin for part in (q, k))
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    heads = scaled_dot_product_attention(q, k, v, mask)
    return attention.proj(heads.squeeze(0).transpose(0, 1).reshape(patches, -1))


def rotated(part: Tensor) -> Tensor:
    """Swap the halves of each head and negate the second one (`rotate_half`)."""
    first, second = part.chunk(2, -1)
    return torch.cat((-second, first), -1)


def width(model: Any) -> int:
    """Channels of the tower."""
    vision = model.config.vision_config
    return getattr(vision, "embed_dim", None) or vision.hidden_size


def inputs(model: Any) -> tuple[Port, ...]:
    """Inputs of `Blocks`."""
    channels = width(model)
    return (
        Port("hidden_states", (PATCHES, channels)),
        Port("attention_mask", (1, PATCHES, PATCHES), (1, 2)),
        Port("rotary_pos_emb", (PATCHES, channels // model.config.vision_config.num_heads // 2)),
    )


def patches(model: Any) -> Graph:
    """The graph that embeds patches."""
    vision = model.config.vision_config
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return Graph(model.model.visual.patch_embed, (Port("hidden_states", (PATCHES, size)),))


def problems(config: Mapping[str, Any]) -> list[str]:
    """Reasons why the model cannot be written, such as numbers that are fixed in `VLMPipeline`."""
    problems, frames = decoder_problems(config), config["vision_config"]["temporal_patch_size"]
    if frames != 2:
        problems.append(f"OpenVINO GenAI takes 2 frames of a video together, the tower takes {frames}")
    return problems
