"""Observe keys and values as vLLM caches them, keys after RoPE.

vLLM stores `k / k_scale` and `v / v_scale` as float8_e4m3, with one scale of each kind a layer. Without scales it uses
1.0, which clips values beyond 448 and wastes range on small ones.
"""

from __future__ import annotations

from typing import Any

from compressed_tensors.modeling.kvcache import initialize_hooked_kv_cache
from llmcompressor.core import active_session
from llmcompressor.modifiers.utils.hooks import HooksMixin
from torch import Tensor, nn

from vlmcompress.statistics.kv_range import KVRange


def watch(model: nn.Module, attention: nn.Module, hooks: HooksMixin) -> KVRange:
    """Follow the keys and values of an attention module.

    Args:
        model: the whole model (its config describes the cache).
        attention: the attention module, which gets a cache object that can be observed.
        hooks: registers the hooks, so that they are off while a quantized block's output is passed on.
    """
    seen = KVRange()

    def hook(which: int) -> Any:
        def see(_module: nn.Module, states: Tensor) -> None:
            state = active_session().state
            assert state.loss_masks is not None
            mask = state.loss_masks[state.current_batch_idx]
            seen.update(which, states, mask if (states.shape[0], states.shape[2]) == mask.shape else None)

        return see

    initialize_hooked_kv_cache(model, attention)
    hooks.register_hook(attention, hook(0), "key")
    hooks.register_hook(attention, hook(1), "value")
    return seen
