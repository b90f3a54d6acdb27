"""Gemma 4 without experts: a tower pooled in the image's own shape, a decoder of attention in windows and in full.

Its norms compute `x * weight`, unlike those of Gemma 3, and each block has four of them: attention reads `input_layernorm`, the
MLP `pre_feedforward_layernorm`; the other two act on a branch's output. Values are normalized head by head, so `o_proj` has
nothing to smooth into. The last blocks of small models reuse keys and values of an earlier block and have neither layer;
blocks of full attention in large models use keys as values and have no `v_proj`. Small models add a per-layer embedding.

Each linear layer of the tower clips its input and output, so it forms its own group, and nothing can be scaled there. The
audio tower, if there is one, is not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from vlmcompress.models._images import ImageSetting, Layout, Piece
from vlmcompress.models._spec import (
    DOWN,
    QKV,
    EngineNames,
    Engines,
    Images,
    LinearGroup,
    MlxClass,
    ModelSpec,
    Prefixes,
    Tower,
)
from vlmcompress.models.families import gemma3

ENGINE: Prefixes = (
    ("model.language_model", "language_model.model"),
    ("model.vision_tower", "vision_tower"),
    ("model.embed_vision", "embed_vision"),
    ("model.audio_tower", "audio_tower"),
    ("model.embed_audio", "embed_audio"),
    ("lm_head", "language_model.lm_head"),
)


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of Gemma 4: one grid in the image's own shape, scaled up or down to the budget of tokens."""
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

    images_of = processor.image_processor
    patch, pool = images_of.patch_size, images_of.pooling_kernel_size
    sides = get_aspect_ratio_preserving_size(height, width, patch, images_of.max_soft_tokens * pool**2, pool)
    rows, columns = (side // (patch * pool) for side in sides)
    return Layout((Piece.whole(rows, columns, width, height),))


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of Gemma 4's processor."""
    vision = config.vision_config
    names = ("patch_size", "pooling_kernel_size")
    return {f"image_processor.{name}": getattr(vision, name) for name in names}


def sizes(processor: Any, read_by_vllm: str = "default_output_length") -> list[ImageSetting]:
    """Settings of Gemma 4: the budget of tokens, one of those that it was trained with.

    vLLM takes it from config.json (`gemma4_mm.py::_compute_num_soft_tokens`), entry `read_by_vllm` of `vision_config`.
    """
    now = processor.image_processor.max_soft_tokens
    smaller = [budget for budget in (70, 140, 280, 560, 1120) if budget < now]
    return [
        ImageSetting(budget, {"max_soft_tokens": budget}, {"vision_config": {read_by_vllm: budget}})
        for budget in smaller
    ] + [ImageSetting(now, config={"vision_config": {read_by_vllm: now}})]


def vllm_differs(config: Mapping[str, Any], cpu: bool) -> str | None:
    """As in Gemma 3, in models whose attention goes both ways within an image."""
    both_ways = config["text_config"].get("use_bidirectional_attention") == "vision"
    return gemma3.vllm_differs(config, cpu) if both_ways else None


SPEC = ModelSpec(
    family="gemma4",
    model_types=("gemma4",),
    groups=(
        QKV,
        LinearGroup("o", ("self_attn.o_proj",)),
        LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), ("pre_feedforward_layernorm",), fused=True),
        DOWN,
        LinearGroup("per_layer_gate", ("per_layer_input_gate",)),
        LinearGroup("per_layer_out", ("per_layer_projection",)),
    ),
    vision=("model.vision_tower",),
    projector=("model.embed_vision",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=(
        LinearGroup("q", ("self_attn.q_proj.linear",)),
        LinearGroup("k", ("self_attn.k_proj.linear",)),
        LinearGroup("v", ("self_attn.v_proj.linear",)),
        LinearGroup("o", ("self_attn.o_proj.linear",)),
        LinearGroup("gate", ("mlp.gate_proj.linear",)),
        LinearGroup("up", ("mlp.up_proj.linear",)),
        LinearGroup("down", ("mlp.down_proj.linear",)),
    ),
    layout=layout,
    mixed_blocks="attention in windows, and in large models both ways within an image",
    names=EngineNames(prefixes=ENGINE, mapper=(*ENGINE, ("model", "language_model.model"))),
    tower=Tower(whole=True),
    images=Images(placeholders=placeholders, sizes=sizes, token_side=attrgetter("vision_config.pooling_kernel_size")),
    engine=Engines(vllm_differs=vllm_differs, tool_calls=("gemma4", "<|tool_call>"), mlx=MlxClass(head="tied")),
)
