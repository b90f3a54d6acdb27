"""PaddleOCR-VL: llama.cpp's `paddleocr` with its projector of that name; a tower of SigLIP at an image's own size."""

from __future__ import annotations

from vlmcompress.export.gguf.families._parts import (
    CLIP_BLOCK,
    CLIP_KEYS,
    activation,
    blocks,
    both,
    decoder,
    pixel_limits,
    rope_problems,
    square_pixels,
    text_keys,
    vision_keys,
)
from vlmcompress.export.gguf.families._qwen import TOWER, sections
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, always

ENCODER = f"{TOWER}.vision_model"


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    problems, merge = rope_problems(facts), facts.config["vision_config"]["spatial_merge_size"]
    if merge != 2:
        problems.append(f"llama.cpp merges 2x2 patches of PaddleOCR-VL; this model merges {merge}x{merge}")
    return problems


FAMILY = GgufFamily(
    arch=always("paddleocr"),
    language=GgufFile(text_keys(rope__dimension_sections=sections), decoder()),
    vision=GgufFile(
        vision_keys(
            "paddleocr",
            image_min_pixels=square_pixels("shortest_edge"),
            image_max_pixels=square_pixels("longest_edge"),
            **CLIP_KEYS,
        )
        | activation(),
        (
            *both(f"{ENCODER}.embeddings.patch_embedding", "v.patch_embd"),
            *both(f"{ENCODER}.embeddings.position_embedding", "v.position_embd"),
            *blocks(f"{ENCODER}.encoder.layers.{{}}", CLIP_BLOCK),
            *both(f"{ENCODER}.post_layernorm", "v.post_ln"),
            *both("model.projector.pre_norm", "mm.input_norm"),
            *both("model.projector.linear_1", "mm.1"),
            *both("model.projector.linear_2", "mm.2"),
        ),
    ),
    image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    limits=pixel_limits,
    problems=problems,
)
