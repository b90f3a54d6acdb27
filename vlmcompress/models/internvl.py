"""InternVL 2.5/3 in its transformers form (`-hf` checkpoints): InternViT, pixel shuffle, Qwen2 or Llama decoder.

vLLM runs the tower's attention projections as plain torch layers, which cannot be quantized: only its MLPs are listed.
"""

from __future__ import annotations

from vlmcompress.models._spec import LLAMA, LinearGroup, ModelSpec

SPEC = ModelSpec(
    family="internvl",
    model_types=("internvl",),
    layers="model.language_model.layers",
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layer",
    vision_groups=(
        LinearGroup("fc1", ("mlp.fc1",), ("layernorm_after",)),
        LinearGroup("fc2", ("mlp.fc2",)),
    ),
    image_token="image_token_id",
    engine_prefixes=(
        ("model.language_model", "language_model.model"),
        ("model.vision_tower", "vision_tower"),
        ("model.multi_modal_projector", "multi_modal_projector"),
        ("lm_head", "language_model.lm_head"),
    ),
)
