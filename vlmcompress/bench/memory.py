"""Memory of a side: weights on disk, and the KV cache by formula and as the engine sized it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vlmcompress.results import Memory

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def kv_bytes_per_token(config: Mapping[str, Any], cache_dtype: str) -> int | None:
    """Bytes of the KV cache for a token: 2 (key and value) x layers x KV heads x head size x bytes, for full attention.

    Args:
        config: `config.json` of a checkpoint.
        cache_dtype: the engine's type of the KV cache; `auto` is the type of the activations.

    Returns:
        The bytes; None for other attention (latent, sliding windows, linear layers), where they depend on the position, and
        for types of the cache that hold scales between the values.
    """
    text = config.get("text_config") or config
    kinds = set(text.get("layer_types") or ()) - {"full_attention"}
    sliding = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    if kinds or sliding or any(text.get(key) for key in ("kv_lora_rank", "mamba_d_state", "linear_num_key_heads")):
        return None
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    kind = str(dtype or "bfloat16") if cache_dtype == "auto" else cache_dtype
    size = 1 if kind in ("fp8", "fp8_e4m3", "fp8_e5m2") else _BYTES.get(kind)
    try:
        heads = text["num_attention_heads"]
        width = text.get("head_dim") or text["hidden_size"] // heads
        return size and 2 * text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads) * width * size
    except KeyError:
        return None


def memory(weight_bytes: int, per_token: int, request_tokens: float, cache: Mapping[str, str]) -> Memory:
    """Compute a side's memory.

    Args:
        per_token: bytes of the KV cache for one token.
        request_tokens: tokens of a mean request, prompt and output.
        cache: vLLM's `cache_config_info` as text: `block_size` and `kv_cache_size_tokens`.
    """
    block, capacity = int(cache["block_size"]), int(cache["kv_cache_size_tokens"])
    held = math.ceil(request_tokens / block) * block
    return Memory(
        weight_bytes=weight_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes_per_request=held * per_token,
        kv_cache_bytes=capacity * per_token,
        max_concurrency=round(capacity / held, 2),
    )
