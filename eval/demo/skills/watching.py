"""What a demo needs to be given clips: a chat template with videos, the size of frames, and the pace of their positions."""

from typing import Any

from vlmcompress.utils.errors import UserError

FRAME = {"longest_edge": 96 * 96, "shortest_edge": 32 * 32}
"""Bounds of a frame's pixels: 6 x 6 visual tokens for each pair of frames of 224 x 224."""
PACE = 1
"""M-RoPE positions per second. The demos learned positions of images, which are few; Qwen's own four go far beyond."""
_IMAGE = "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}\n"
_VIDEO = "{%- elif part['type'] in ('video', 'video_url') -%}\n{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}\n"


def watch(config: Any, processor: Any) -> None:
    """Change the configuration and the processor of demo-qwen, in place. UserError: of another demo, which takes no videos."""
    if getattr(processor, "video_processor", None) is None:
        raise UserError(f"{type(processor).__name__} takes no videos; teach demo-qwen to watch clips")
    config.vision_config.tokens_per_second = PACE
    processor.video_processor.size = FRAME
    before, image, after = processor.chat_template.partition(_IMAGE)
    assert image
    processor.chat_template = before + image + _VIDEO + after
