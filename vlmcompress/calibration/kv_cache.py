"""Observe keys and values as vLLM caches them, keys after RoPE.

vLLM stores `k / k_scale` and `v / v_scale` as float8_e4m3, with one scale of each kind a layer. Without scales it uses
1.0, which clips values beyond 448 and wastes range on small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vlmcompress.statistics.kv_range import KVRange


class _Cache:
    """Stands for an empty cache in one call of an attention module, which shows it its keys and values."""

    def __init__(self, seen: KVRange, mask: Tensor):
        self.seen, self.mask = seen, mask

    def update(self, keys: Tensor, values: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Note keys and values `[samples, heads, tokens, channels]` and give them back."""
        for which, states in enumerate((keys, values)):
            fits = (states.shape[0], states.shape[2]) == self.mask.shape
            self.seen.update(which, states, self.mask if fits else None)
        return keys, values


def watch(attention: nn.Module, seen: KVRange, modality: Callable[[], Tensor]) -> RemovableHandle:
    """Follow the keys and values of an attention module until the handle is removed.

    Args:
        seen: takes them.
        modality: gives that of the tokens of the present batch, `[samples, tokens]`.
    """

    def show(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {"past_key_values": _Cache(seen, modality())}

    return attention.register_forward_pre_hook(show, with_kwargs=True)
