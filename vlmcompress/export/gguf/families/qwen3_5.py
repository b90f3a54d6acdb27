"""Qwen3.5, 3.6 and 3.8, dense: llama.cpp's `qwen35` with Qwen3-VL's projector, without deepstack."""

from __future__ import annotations

from vlmcompress.export.gguf.families import _delta_net
from vlmcompress.export.gguf.families._parts import pixel_limits, rope_problems
from vlmcompress.export.gguf.families._qwen import IMAGE
from vlmcompress.export.gguf.families.qwen3_vl import VISION
from vlmcompress.export.gguf.spec import GgufFamily, ModelFacts, always


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    return rope_problems(facts) + _delta_net.problems(facts)


FAMILY = GgufFamily(
    arch=always("qwen35"),
    language=_delta_net.language(),
    vision=VISION,
    image=IMAGE,
    limits=pixel_limits,
    problems=problems,
)
