"""What vLLM reads in a file of scales for FP8 attention in the vision tower; runs where `engine_worker.py` does."""

from __future__ import annotations

from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`{"file"}` -> layer -> `{"q", "k", "v"}`."""
    from vllm.model_executor.layers.attention.mm_encoder_attention import _load_fp8_scales_file

    return _load_fp8_scales_file(job["file"])
