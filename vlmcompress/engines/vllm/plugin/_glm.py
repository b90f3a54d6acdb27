"""Shared code of the GLM-V families: images as in Qwen-VL. Videos are not served, as their placeholders are images' there."""

from __future__ import annotations

from vllm.model_executor.models.glm4_1v import Glm4vMultiModalProcessor, Glm4vProcessingInfo

from vlmcompress.engines.vllm.plugin._qwen import ImagesInfo, QwenProcessor


class GlmInfo(ImagesInfo, Glm4vProcessingInfo):
    """vLLM's processing info of these families, with the counts of reduced images."""


class GlmProcessor(QwenProcessor, Glm4vMultiModalProcessor):
    """vLLM's processor of these families, with a placeholder for each kept token."""
