"""The served model's own first layers run ahead on one image and its question, within the multimodal stage.

vLLM's layers run as they are, quantized linear layers and tensor parallelism included, one sequence at a time. Only their
attention is plain causal attention meanwhile, since nothing of this sequence belongs into the paged cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

from vlmcompress.reducers import Grid, Signals
from vlmcompress.reduction._ahead import Enough, positions, signals
from vlmcompress.reduction._tap import received


class Ahead:
    """The first layers of one of vLLM's language models."""

    def __init__(self, language_model: Any, options: Any, rotated: bool):
        """`options`: of the reducer; `layer` is K, `states` whether the output of layer K - 1 is read.

        `rotated`: whether the layers take M-RoPE's positions.
        """
        self._model = getattr(language_model, "model", language_model)
        self._options, self._rotated = options, rotated

    def signals(self, grid: Grid, rows: Tensor, query: Tensor, levels: Sequence[Tensor] = ()) -> Signals:
        """What they tell of an image.

        Args:
            rows: `[n, d]`, its tokens as the language model gets them.
            query: `[q, d]`, embeddings of the question's words.
            levels: `[n, d]` each, what deepstack adds to the image's tokens behind the first layers.
        """
        layers = self._model.layers[: self._options.layer]
        found: dict[str, Any] = {}

        def hear(query: Tensor, key: Tensor, scale: float) -> None:
            heads = key.shape[1] * get_tensor_model_parallel_world_size()
            found.update(saliency=_of_last(query, key, scale), keys=_all_heads(key), heads=heads)
            if not self._options.states:
                raise Enough

        where = positions(grid, len(query), self._rotated, rows.device)
        where = where if self._rotated else where[0]
        hidden, residual = torch.cat([rows, query]), None
        for number, layer in enumerate(layers, 1):
            with _plain(layer.self_attn, hear if number == len(layers) else None), contextlib.suppress(Enough):
                hidden, residual = layer(where, hidden, residual)
                for level in levels[number - 1 : number]:
                    hidden[: len(rows)] += level
        states = self._model.norm(hidden, residual)[0] if self._options.states else None
        return signals(grid, found["saliency"], found["keys"], found["heads"], states)


class _Causal(nn.Module):
    """Attention over one sequence, in the place of a layer's paged one."""

    def __init__(self, attention: Any, listener: Callable[[Tensor, Tensor, float], None] | None):
        super().__init__()
        self._heads, self._key_heads, self._scale = attention.num_heads, attention.num_kv_heads, attention.scaling
        self._listener = listener

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[s, heads * d]`, `[s, key heads * d]` twice; the output is as the first."""
        q = _heads_first(query, self._heads)
        k, v = (_heads_first(x, self._key_heads) for x in (key, value))
        if self._listener:
            self._listener(q, k, self._scale)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


@contextlib.contextmanager
def _plain(attention: Any, listener: Callable[[Tensor, Tensor, float], None] | None) -> Iterator[None]:
    """Meanwhile `attention` runs without a cache, and tells `listener`, if any, its queries and keys `[1, heads, s, d]`."""
    own = attention.attn
    attention.attn = _Causal(attention, listener)
    try:
        yield
    finally:
        attention.attn = own


def _of_last(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """`[s]`: attention of the last token, mean over the heads of all devices."""
    got = received(query[:, :, -1], key, scale)[0]
    devices = get_tensor_model_parallel_world_size()
    return got if devices == 1 else tensor_model_parallel_all_reduce(got) / devices


def _all_heads(key: Tensor) -> Tensor:
    """`[s, heads * d]` from `[1, key heads, s, d]`, heads of all devices one after the other."""
    own = key[0].transpose(0, 1).flatten(1)
    return own if get_tensor_model_parallel_world_size() == 1 else tensor_model_parallel_all_gather(own.contiguous())


def _heads_first(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)[None]
