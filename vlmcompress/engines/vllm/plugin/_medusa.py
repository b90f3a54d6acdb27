"""Medusa heads in vLLM 0.32. vLLM 0.33 has no Medusa any more: this file goes with the support of 0.32.

The table of the tokens that its heads can guess becomes a parameter, of which the check of what was loaded knows nothing:
"weights were not initialized from checkpoint: {'token_map'}".
"""

from __future__ import annotations

from typing import Any

from vlmcompress.engines.vllm.plugin._mended import MODELS, when_imported


def register() -> None:
    """Mend it once vLLM's module is imported, which 0.33 does not have."""
    when_imported(f"{MODELS}.medusa", _count_table)


def _count_table(module: Any) -> None:
    """Count the table of guessable tokens among what was loaded, and have it where the heads are."""
    # vllm/model_executor/model_loader/default_loader.py::DefaultModelLoader.track_weights_loading complains of the table.
    load = module.Medusa.load_weights

    def load_weights(self: Any, weights: Any) -> set[str]:
        loaded: set[str] = load(self, weights)
        if self.token_map is None:
            return loaded
        self.token_map.data = self.token_map.data.to(self.lm_heads[0].weight.device)
        return loaded | {"token_map"}

    module.Medusa.load_weights = load_weights
