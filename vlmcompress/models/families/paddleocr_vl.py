"""PaddleOCR-VL: SigLIP at native resolution, a projector that merges patches, ERNIE 4.5 decoder, M-RoPE positions."""

from __future__ import annotations

from typing import Any

from vlmcompress.models._images import Layout, Piece
from vlmcompress.models._spec import CLIP, LLAMA, EngineNames, Images, ModelSpec, Prefixes, Tower
from vlmcompress.models.families import qwen2_vl

MAPPER: Prefixes = (("model", "language_model.model"), ("lm_head", "language_model.lm_head"))


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of PaddleOCR-VL: one grid in the image's own shape, with its own rounding of narrow images."""
    from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import smart_resize

    images_of = processor.image_processor
    unit, size = images_of.patch_size * images_of.merge_size, images_of.size
    sides = smart_resize(height, width, unit, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])
    return Layout((Piece.whole(sides[0] // unit, sides[1] // unit, width, height),))


def sample_centres(model: Any) -> None:
    """Resample the tower's table of positions at the centres of patches, as the authors' code, vLLM, and transformers to 5.12.

    transformers 5.13 to 5.20 aligns the outer patches with the table's corners (`modeling_paddleocr_vl.py`).
    """
    for module in model.modules():
        if hasattr(module, "interpolation_align_corners"):
            module.interpolation_align_corners = False


SPEC = ModelSpec(
    family="paddleocr-vl",
    model_types=("paddleocr_vl",),
    groups=LLAMA,
    vision=("model.visual",),
    projector=("model.projector",),
    vision_layers="model.visual.vision_model.encoder.layers",
    vision_groups=CLIP,
    layout=layout,
    tower=Tower(mend=sample_centres),
    names=EngineNames(
        prefixes=(
            ("model.language_model", "language_model.model"),
            ("model.visual", "visual"),
            ("model.projector", "mlp_AR"),
            ("lm_head", "language_model.lm_head"),
        ),
        mapper=MAPPER,
        hub=(("model.language_model", "model"), ("model.visual", "visual"), ("model.projector", "mlp_AR")),
    ),
    images=Images(
        placeholders=qwen2_vl.placeholders,
        sizes=qwen2_vl.sizes,
        token_side=qwen2_vl.SPEC.images.token_side,
        positions="mrope",
        grid="thw",
    ),
)
