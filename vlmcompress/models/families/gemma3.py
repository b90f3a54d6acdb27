"""Gemma 3: SigLIP tower, one-matrix projector, Gemma decoder.

Its norms compute `x * (1 + weight)`, and each block has four of them: the MLP reads `pre_feedforward_layernorm`, while
`post_attention_layernorm` and `post_feedforward_layernorm` act on a branch's output and cannot absorb scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vlmcompress.models._images import Layout, Piece
from vlmcompress.models._spec import (
    ATTENTION_OUT,
    CLIP,
    DOWN,
    LLAVA_NAMES,
    QKV,
    Engines,
    Images,
    LinearGroup,
    MlxClass,
    ModelSpec,
    Tower,
)


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of Gemma 3: the image resized to a square, regardless of its shape (pan and scan is off by default)."""
    n = math.isqrt(processor.image_seq_length)
    return Layout((Piece.whole(n, n, width, height),))


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of Gemma 3's processor."""
    return {"image_seq_length": config.mm_tokens_per_image}


def image_processor(config: Any) -> Any:
    """An empty object: `layout` reads no setting."""
    return SimpleNamespace()


def token_side(config: Any) -> int:
    """Side of the square of patches whose mean is a visual token."""
    vision = config.vision_config
    return vision.image_size // vision.patch_size // math.isqrt(config.mm_tokens_per_image)


def vllm_differs(config: Mapping[str, Any], cpu: bool) -> str | None:
    """vLLM's attention backend for CPUs has no image prefixes (0.32: `v1/attention/backends/cpu_attn.py`)."""
    return "attention within an image is causal in vLLM's CPU build" if cpu else None


SPEC = ModelSpec(
    family="gemma3",
    model_types=("gemma3",),
    groups=(
        QKV,
        ATTENTION_OUT,
        LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), ("pre_feedforward_layernorm",), fused=True),
        DOWN,
    ),
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    layout=layout,
    image_token="image_token_index",
    mixed_blocks="attention in windows, and both ways within an image",
    norm_offset=1.0,
    names=LLAVA_NAMES,
    tower=Tower(joint=("self_attn", "layer_norm2"), merging=(("siglip_vision_model", "full"),)),
    images=Images(placeholders=placeholders, processor=image_processor, token_side=token_side, grid="tiles"),
    engine=Engines(vllm_differs=vllm_differs, mlx=MlxClass(full_attention="sliding_window_pattern")),
)
