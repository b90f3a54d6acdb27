"""Gemma 4 without a tower (12B): patches of raw pixels pass one linear layer and norms, and enter the decoder of Gemma 4.

What embeds patches and sound stays in 16 bits. No block has a per-layer embedding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from vlmcompress.models.families import gemma4

SPEC = replace(
    gemma4.SPEC,
    family="gemma4-unified",
    model_types=("gemma4_unified",),
    groups=tuple(group for group in gemma4.SPEC.groups if not group.name.startswith("per_layer")),
    vision=tuple(f"model.embed_vision.{name}" for name in ("patch_ln1", "patch_dense", "patch_ln2", "pos_norm")),
    projector=("model.embed_vision.multimodal_embedder",),
    vision_layers="",
    vision_groups=(),
    images=replace(gemma4.SPEC.images, sizes=partial(gemma4.sizes, read_by_vllm="num_soft_tokens")),
    names=replace(
        gemma4.SPEC.names,
        prefixes=(
            ("model.embed_vision.multimodal_embedder", "embed_vision"),
            ("model.embed_vision", "vision_embedder"),
            *gemma4.ENGINE,
        ),
        mapper=(("model.vision_embedder", "vision_embedder"), *gemma4.SPEC.names.mapper),
        hub=(
            ("model.embed_vision.multimodal_embedder", "model.embed_vision"),
            ("model.embed_vision", "model.vision_embedder"),
        ),
    ),
)
