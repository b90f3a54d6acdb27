"""Names of compressed-tensors' presets, as llm-compressor's users write them: the same number format, or a reasoned refusal.

A scheme lists the presets that it can produce in `PRESETS`: preset name -> options. Names are case-insensitive unless one
of our schemes has the name in lower case: `FP8` is the preset, with static scales, and `fp8` our scheme. A preset fixes the
number format, not the method that finds the values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import note
from vlmcompress.utils.registry import SCHEMES
from vlmcompress.utils.settings import Layer

REFUSED = {
    r"W\dA4": "no engine computes with integer activations of 4 bits; take W4A16, or NVFP4 for 4-bit floats",
    r"W\dA8": "vLLM has no kernel on x86 or a GPU for such weights in groups with 8-bit integer activations; take W8A8, "
    "W4AFP8, or scheme mbq with options.activations=8, whose weights have a scale per row",
    "QRONOS": "it is gone, as it was no better than gptq-plus in twice the time; take gptq-plus",
    "MXFP8A16": "vLLM always rounds the inputs of MXFP8 weights; take MXFP8, or W8A16",
}
"""Pattern of unsupported presets and earlier schemes -> the reason."""


DIFFERENT = ("FP8", "NVFP4", "W8A16")
"""Presets that differ from our scheme with the same name in lower case."""


@functools.cache
def presets() -> dict[str, tuple[str, dict[str, Any]]]:
    """Preset -> its scheme and options."""
    return {
        preset: (scheme, options)
        for scheme in SCHEMES.names()
        for preset, options in (SCHEMES.constant(scheme, "PRESETS") or {}).items()
    }


def resolve_scheme(text: str) -> tuple[str, dict[str, Any]]:
    """The scheme and options of a name: a preset's options, else none.

    Raises:
        UserError: the preset is not supported.
    """
    preset, scheme = text.strip().upper().replace("-", "_"), SCHEMES.name(text)
    if scheme in SCHEMES and not (text == text.upper() and preset in presets()):
        return scheme, {}
    if preset in presets():
        return presets()[preset]
    for pattern, reason in REFUSED.items():
        if re.fullmatch(pattern, preset):
            raise UserError(f"scheme {text}: {reason}")
    return scheme, {}


def expanded(layer: Layer) -> Layer:
    """Settings with a preset's name replaced by its scheme and, where not set, its options."""
    origin, settings = layer
    text, options = settings.get("scheme"), settings.get("options", {})
    if not isinstance(text, str):
        return layer
    scheme, preset = resolve_scheme(text)
    if text in DIFFERENT:
        differs = "".join(f", options.{key}={value}" for key, value in preset.items())
        note(f"{text} is compressed-tensors' preset: scheme {scheme}{differs}; {text.lower()} is another scheme")
    if isinstance(options, Mapping) and (preset or options):
        return origin, {**settings, "scheme": scheme, "options": {**preset, **options}}
    return origin, {**settings, "scheme": scheme}
