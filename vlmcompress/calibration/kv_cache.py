"""Scales of an FP8 KV cache: the largest key and value seen over the calibration set, over the largest FP8 number.

vLLM stores `k / k_scale` and `v / v_scale` as float8_e4m3 with one scale per layer each; keys are taken after RoPE, as
they are cached. Without scales vLLM uses 1.0, which clips nothing but wastes range on small values.
"""

from __future__ import annotations

import torch
from compressed_tensors.modeling.kvcache import initialize_hooked_kv_cache
from llmcompressor.modifiers.utils.hooks import HooksMixin
from torch import Tensor, nn

FP8_MAX = 448.0


class KVRange:
    """Follows the absolute maxima of one attention module's keys and values.

    Args:
        model: the whole model (its config describes the cache).
        attention: the attention module; gets a cache object that can be observed.
        hooks: registers the hooks, so that they rest while a quantized block's output is passed on.
    """

    def __init__(self, model: nn.Module, attention: nn.Module, hooks: HooksMixin):
        self.maxima = torch.zeros(2)
        initialize_hooked_kv_cache(model, attention)
        hooks.register_hook(attention, lambda _module, keys: self._see(0, keys), "key")
        hooks.register_hook(attention, lambda _module, values: self._see(1, values), "value")

    def _see(self, index: int, states: Tensor) -> None:
        self.maxima[index] = torch.maximum(self.maxima[index], states.abs().max().float().cpu())

    def scales(self) -> Tensor:
        """Scales of keys and values, `[2]`, float32."""
        return self.maxima.clamp_min(1e-6) / FP8_MAX
