"""Inference engines: `get("vllm")`, `get("hf")` or `get("openai:http://localhost:8000")` answers requests.

The local ones are processes of their own: the compressor's environment and the engine's may differ.
"""

from __future__ import annotations

from vlmcompress.engines.base import Engine
from vlmcompress.errors import UserError, did_you_mean

NAMES = ("vllm", "hf", "openai:URL")


def get(spec: str) -> Engine:
    """Return the engine that `spec` names.

    Raises:
        UserError: there is no engine of that name, or its address is not a URL.
    """
    name, _, address = spec.partition(":")
    if spec == "vllm":
        from vlmcompress.engines.vllm.runner import ENGINE

        return ENGINE
    if spec == "hf":
        from vlmcompress.engines.hf import ENGINE

        return ENGINE
    if name == "openai":
        from vlmcompress.engines.openai import OpenAI

        return OpenAI.at(address)
    raise UserError(f"unknown engine '{spec}'{did_you_mean(name, NAMES)}")
