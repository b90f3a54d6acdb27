"""Scales of an FP8 KV cache: the largest key and value seen over the calibration set, over the largest FP8 number.

vLLM stores `k / k_scale` and `v / v_scale` as float8_e4m3 with one scale per layer each; keys are taken after RoPE, as
they are cached. Without scales vLLM uses 1.0, which clips nothing but wastes range on small values.
"""

from __future__ import annotations

from typing import Any

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
        hooks.register_hook(attention, self._see_keys, "key")  # type: ignore[arg-type]
        hooks.register_hook(attention, self._see_values, "value")  # type: ignore[arg-type]

    def _see_keys(self, _module: nn.Module, keys: Tensor) -> Any:
        self.maxima[0] = torch.maximum(self.maxima[0], keys.abs().max().float().cpu())

    def _see_values(self, _module: nn.Module, values: Tensor) -> Any:
        self.maxima[1] = torch.maximum(self.maxima[1], values.abs().max().float().cpu())

    def scales(self) -> Tensor:
        """Scales of keys and values, `[2]`, float32."""
        return self.maxima.clamp_min(1e-6) / FP8_MAX
