"""Read queries and keys of an attention module as it runs, with any kernel, or compute in the kernel's place.

transformers' attention modules look up their kernel by the name in their config. A module gets a copy of its config with the
name of a function that finds what to run instead; undoing restores the original config. No attention map is computed, and
nothing else in the model changes.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from vlmcompress.utils.errors import UserError

Listener = Callable[[Tensor, Tensor, float], None]
"""A function of queries `[b, heads, s, d]`, keys `[b, key heads, t, d]` (both with positions) and the scale of logits."""

_NAME = "vlmcompress_tap"
_KERNELS: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()


def replace_kernel(attention: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
    """Have `attention` compute by `run(kernel, module, query, key, value, mask, scaling=..., ...)`, `kernel` being its own.

    Returns a function that undoes it.
    """
    attention_config: Any = attention.config
    kernel = attention_config._attn_implementation
    if kernel not in AttentionInterface():
        raise UserError(f"attention '{kernel}' cannot be read; load the model with attn_implementation='sdpa'")
    # transformers/modeling_utils.py::AttentionInterface is the public registry; a module finds its kernel by the name in its
    # config at each call, so a copy of the config with another name is enough.
    AttentionInterface.register(_NAME, lambda module, *args, **kwargs: _KERNELS[module](module, *args, **kwargs))
    config: Any = copy.copy(attention_config)
    config._attn_implementation = _NAME
    _KERNELS[attention] = functools.partial(run, AttentionInterface()[kernel])
    attention.config = config

    def undo() -> None:
        attention.config = attention_config
        _KERNELS.pop(attention, None)

    return undo


def tap(attention: nn.Module, listener: Listener) -> Callable[[], None]:
    """Call `listener` whenever `attention` runs. Returns a function that undoes it."""

    def run(
        kernel: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        listener(query.detach(), key.detach(), kwargs["scaling"])
        return kernel(module, query, key, *args, **kwargs)

    return replace_kernel(attention, run)


def received(query: Tensor, key: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Compute the attention that keys get from one query per row, averaged over heads: `[b, t]`.

    Args:
        query: `[b, heads, d]`, one for each row of the batch.
        key: `[b, key heads, t, d]`; heads share a key head in equal groups.
        scale: factor of the products of queries and keys.
        mask: `[b, t]` bool, true for keys that the query may attend to.
    """
    b, heads, d = query.shape
    # Like the kernels, in float32: in bfloat16 a softmax over thousands of keys would have less than two digits.
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(wide).view(b, key.shape[1], heads // key.shape[1], d)
    logits = torch.einsum("bkgd,bktd->bkgt", grouped, key.to(wide)) * scale
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None, :], -torch.inf)
    return logits.softmax(-1).mean((1, 2))


def join_heads(key: Tensor) -> Tensor:
    """Concatenate the heads of keys `[b, heads, t, d]`: `[b, t, heads * d]`."""
    return key.transpose(1, 2).flatten(2)
