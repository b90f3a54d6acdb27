"""The file of scales for FP8 attention in the vision tower, and the flags with which vLLM 0.32 reads it.

JSON, vLLM's own format (`_load_fp8_scales_file` in `layers/attention/mm_encoder_attention.py`): name of the attention layer in
vLLM -> `{"q", "k", "v"}`, by which queries, keys and values are divided before they become float8_e4m3. Nothing else in the
checkpoint depends on it: without the flags the tower computes in 16 bits.
"""

from __future__ import annotations

import shlex
from pathlib import Path

NAME = "vision_attention_scales.json"
PATH_FLAG = "--mm-encoder-fp8-scale-path"


def flags(folder: Path, backend: str = "FLASHINFER") -> list[str]:
    """Flags of `vllm serve` for a checkpoint's file; `backend` is FLASHINFER on Blackwell, ROCM_AITER_FA on MI300."""
    return [
        *("--mm-encoder-attn-backend", backend),
        *("--mm-encoder-attn-dtype", "fp8"),
        *(PATH_FLAG, str(folder / NAME)),
    ]


def remark(folder: Path) -> str | None:
    """A line that says how to use a checkpoint's file; None where it has none."""
    if not (folder / NAME).is_file():
        return None
    return f"It has scales for FP8 attention in the vision tower; on Blackwell, add: {shlex.join(flags(folder))}"
