"""Run the served model's own first layers ahead on one image and its question, within the multimodal stage.

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
from vllm.distributed import get_tensor_model_parallel_world_size

from vlmcompress.engines.vllm.plugin._encoder import all_heads, heads_first, mean_of_all
from vlmcompress.hf_hooks.early import Enough, positions, signals
from vlmcompress.hf_hooks.tap import joined, received
from vlmcompress.recipe.reducer import ReducerChoice
from vlmcompress.reducers import Grid, Signals


class Ahead:
    """The first layers of one of vLLM's language models, for methods that read their attention and states."""

    def __init__(self, language_model: Any, chosen: ReducerChoice, rotated: bool):
        """Prepare the first layers. `rotated`: whether they take M-RoPE's positions."""
        self._model = getattr(language_model, "model", language_model)
        self._needed = "ahead" in chosen.module.NEEDS
        self._options, self._rotated = chosen.options, rotated

    def signals(
        self, grid: Grid, rows: Tensor, query: Tensor | None = None, levels: Sequence[Tensor] = ()
    ) -> dict[str, Signals]:
        """Compute the field `ahead` of `Signals` for an image of that grid; empty if the method does not need it.

        Args:
            rows: `[n, d]`, the image's tokens as the language model gets them.
            query: `[q, d]`, embeddings of the question's words, which such a method is always given.
            levels: `[n, d]` each, features that deepstack adds to the image's tokens behind the first layers.
        """
        if not self._needed:
            return {}
        assert query is not None
        return {"ahead": self._run(grid, rows, query, levels)}

    def _run(self, grid: Grid, rows: Tensor, query: Tensor, levels: Sequence[Tensor]) -> Signals:
        """Run layers up to K - 1, K being the reducer's option `layer`; its `states` tells whether their output is read."""
        layers = self._model.layers[: self._options.layer]
        layer_signals: dict[str, Any] = {}

        def hear(query: Tensor, key: Tensor, scale: float) -> None:
            devices = get_tensor_model_parallel_world_size()
            layer_signals["saliency"] = mean_of_all(received(query[:, :, -1], key, scale)[0], devices)
            layer_signals["keys"], layer_signals["heads"] = all_heads(joined(key)[0], devices), key.shape[1] * devices
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
        saliency, keys, heads = (layer_signals[name] for name in ("saliency", "keys", "heads"))
        return signals(grid, saliency, keys, heads, states, finite=True)


class _Causal(nn.Module):
    """Causal attention over one sequence, in the place of a layer's paged attention."""

    def __init__(self, attention: Any, listener: Callable[[Tensor, Tensor, float], None] | None):
        super().__init__()
        self._heads, self._key_heads, self._scale = attention.num_heads, attention.num_kv_heads, attention.scaling
        self._listener = listener

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: query `[s, heads * d]`, key and value `[s, key heads * d]`; the output has the query's shape."""
        q = heads_first(query[None], self._heads)
        k, v = (heads_first(x[None], self._key_heads) for x in (key, value))
        if self._listener:
            self._listener(q, k, self._scale)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
        return joined(out)[0]


@contextlib.contextmanager
def _plain(attention: Any, listener: Callable[[Tensor, Tensor, float], None] | None) -> Iterator[None]:
    """Within the context `attention` runs without a cache, and passes queries and keys `[1, heads, s, d]` to `listener`."""
    kernel = attention.attn
    attention.attn = _Causal(attention, listener)
    try:
        yield
    finally:
        attention.attn = kernel
