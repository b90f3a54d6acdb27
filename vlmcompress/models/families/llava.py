"""LLaVA-1.5: CLIP tower, two-layer projector, Llama or Mistral decoder, one image placeholder per visual token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vlmcompress.models._images import Layout, Piece, cut
from vlmcompress.models._spec import CLIP, CLIP_TOWERS, LLAMA, LLAVA_NAMES, Engines, Images, MlxClass, ModelSpec, Tower
from vlmcompress.utils.errors import UserError


def layout(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of LLaVA-1.5: the image resized and cropped to one size."""
    if processor.num_additional_image_tokens != (processor.vision_feature_select_strategy == "default"):
        raise UserError("a LLaVA that keeps the CLS token is not supported; use one whose features are only patches")
    images_of = processor.image_processor
    box, (wide, high) = (0.0, 0.0, float(width), float(height)), (width, height)
    if getattr(images_of, "do_pad", False):
        side = max(width, height)
        x, y = (width - side) / 2, (height - side) / 2
        box, (wide, high) = (x, y, x + side, y + side), (side, side)
    if images_of.do_resize:
        if short := images_of.size.get("shortest_edge"):
            scale = short / min(wide, high)
            wide, high = (short, int(high * scale)) if wide <= high else (int(wide * scale), short)
        else:
            wide, high = images_of.size["width"], images_of.size["height"]
    if images_of.do_center_crop:
        crop = images_of.crop_size
        box = cut(box, (wide, high), ((wide - crop["width"]) / 2, (high - crop["height"]) / 2), crop)
        wide, high = crop["width"], crop["height"]
    return Layout((Piece(high // processor.patch_size, wide // processor.patch_size, box),))


def placeholders(config: Any) -> dict[str, Any]:
    """Settings of LLaVA's and LLaVA-NeXT's processors. CLIP's CLS token is counted first and then subtracted."""
    vision = config.vision_config
    return {
        "patch_size": vision.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": int(vision.model_type == "clip_vision_model"),
    }


def image_processor(config: Any) -> Any:
    """CLIP's processor: the shorter side resized, the middle cut out."""
    side = config.vision_config.image_size
    square = {"height": side, "width": side}
    return SimpleNamespace(
        do_resize=True, size={"shortest_edge": side}, do_center_crop=True, crop_size=square, do_pad=False
    )


SPEC = ModelSpec(
    family="llava",
    model_types=("llava",),
    groups=LLAMA,
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    vision_layers="model.vision_tower.encoder.layers",
    vision_groups=CLIP,
    layout=layout,
    image_token="image_token_index",
    names=LLAVA_NAMES,
    tower=Tower(
        cls="clip_vision_model",
        units="patch",
        joint=("self_attn", "layer_norm2"),
        merging=CLIP_TOWERS,
        unreduced=(
            ("pixtral", "visual tokens of a Pixtral encoder are not reduced yet; use a LLaVA with CLIP or SigLIP"),
        ),
    ),
    images=Images(placeholders=placeholders, processor=image_processor, grid="patches"),
    engine=Engines(mlx=MlxClass(fewer_tokens=True)),
)
