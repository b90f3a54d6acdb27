"""Check the config of a reduced checkpoint when vLLM loads it, and give the model M-RoPE's machinery.

Kept tokens keep the positions that they have without a reducer. vLLM counts positions up by itself unless a model uses
M-RoPE; then it asks the model for three rows of them. A family with plain RoPE says that it uses M-RoPE, gives three equal
rows and passes one on to its language model, whose RoPE stays what it is.

vLLM knows by an architecture's name what to set in the config of some models (for Qwen3.5 the type of the recurrent state,
which the checkpoint names). Under the reduced name the same is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmcompress.errors import UserError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


@dataclass(frozen=True)
class Loading:
    """vLLM's hook on configs of an architecture (`MODELS_CONFIG_MAP`).

    `original`: vLLM's own hook on configs of the architecture that is reduced, where it has one.
    """

    original: Any = None

    def verify_and_update_model_config(self, model_config: ModelConfig) -> None:
        """Raise ValueError, which ends the engine's start with one line, unless the checkpoint can be served."""
        import vllm
        from vllm.transformers_utils.config import uses_mrope

        from vlmcompress.engines.vllm.plugin._reducer import ServedReducer
        from vlmcompress.engines.vllm.plugin._serves import supported
        from vlmcompress.engines.vllm.plugin._unsupported import message

        if not supported(vllm.__version__):
            raise ValueError(message())
        config: Any = model_config.hf_config
        try:
            ServedReducer.of(config)
        except UserError as error:
            raise ValueError(f"{model_config.model}: {error}") from None
        if not uses_mrope(config):
            config.mrope_section = [1, 1, 1]
        if self.original is not None:
            self.original.verify_and_update_model_config(model_config)

    def verify_and_update_config(self, vllm_config: VllmConfig) -> None:
        """Do what vLLM does for the original architecture once the whole config is known."""
        if self.original is not None:
            self.original.verify_and_update_config(vllm_config)
