"""Stand-in for every family in a vLLM that this plugin was not made for; loading a reduced checkpoint then says so."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def message() -> str:
    """The error's message, which names the versions of vLLM that are supported."""
    import vllm

    from vlmcompress.engines.vllm.plugin._serves import BELOW, LEAST

    least, below = (".".join(map(str, version)) for version in (LEAST, BELOW))
    return (
        f"this vlmcompress serves reduced checkpoints in vLLM {least} up to, not including, {below}; "
        f"this is vLLM {vllm.__version__}: install one of those, or another vlmcompress"
    )


class Unsupported(nn.Module):
    """A class with the method names of a language model, which raises an error when it is made."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        raise ValueError(message())

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Never called."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Never called."""
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Never called."""
        raise NotImplementedError
