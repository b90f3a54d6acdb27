"""A fix for Medusa heads in vLLM 0.32. vLLM 0.33 has removed Medusa: this file can go when support for 0.32 ends.

The table of the heads' tokens becomes a parameter that vLLM's check of loaded weights does not expect: "weights were not
initialized from checkpoint: {'token_map'}".
"""

from __future__ import annotations

from typing import Any

from vlmcompress.engines.vllm.plugin._mended import MODELS, when_imported


def register() -> None:
    """Make vLLM 0.32 count the token table of Medusa heads as loaded, once its module is imported; 0.33 has no such module."""
    when_imported(f"{MODELS}.medusa", _count_table)


def _count_table(module: Any) -> None:
    """Count the token table as loaded, and move it to the heads' device."""
    # vllm/model_executor/model_loader/default_loader.py::DefaultModelLoader.track_weights_loading raises because of the table.
    load = module.Medusa.load_weights

    def load_weights(self: Any, weights: Any) -> set[str]:
        loaded: set[str] = load(self, weights)
        if self.token_map is None:
            return loaded
        self.token_map.data = self.token_map.data.to(self.lm_heads[0].weight.device)
        return loaded | {"token_map"}

    module.Medusa.load_weights = load_weights
