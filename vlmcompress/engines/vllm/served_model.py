"""A model to be served, described without reading weights: from config.json, and from headers if there are weight files.

Its decoder is described by the cache of each block on one of several devices.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from vlmcompress import models
from vlmcompress.engines.vllm import partition
from vlmcompress.models import ModelSpec, Source
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.model_folder import has_weights
from vlmcompress.utils.tensor_headers import Spec

_COUNTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings", "moe_intermediate_size", "sliding_window")
_VISION = ("patch_size", "image_size", "spatial_merge_size", "hidden_size", "intermediate_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ACTIVE = ("num_experts_per_tok", "top_k_experts")
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class CacheLayer:
    """The cache of one decoder block on one device.

    Attributes:
        token_bytes: bytes of keys and values per token; 0 for a recurrent block.
        window: length of the sliding window in tokens; None: full attention.
        state_bytes: bytes of a sequence's state; 0 for attention.
        heads: number of key heads on this device. Layers with different numbers never share a group.
    """

    token_bytes: int
    window: int | None = None
    state_bytes: int = 0
    heads: int = 0


@dataclass(frozen=True)
class Attention:
    """Attention of one block: heads of queries and of keys, entries of a head, and its window."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def token_bytes(self, width: int, scale: int = 0, tp: int = 1) -> int:
        """Bytes of a token's keys and values on one of `tp` devices: numbers of `width` bytes, and `scale` bytes per head.

        A device has at least one key head: with more devices than heads, some hold copies.
        """
        return 2 * max(1, self.kv_heads // tp) * (self.head_dim * width + scale)


@dataclass(frozen=True)
class State:
    """State of a recurrent block for each sequence: (entries, bytes of one) of each of its parts.

    The first part belongs to a convolution, and has `drafted` more entries per drafted token.
    """

    parts: tuple[tuple[int, int], ...]
    heads: int
    drafted: int = 0


@dataclass(frozen=True)
class ServedDecoder:
    """A decoder: its blocks in order (None for one without its own cache), and facts for a serving engine.

    Attributes:
        context: longest context, in tokens; None if the config does not say.
        itemsize: bytes of one number of the cache in the model's dtype; an engine loads float32 as 16 bits.
        experts: experts per block, 0 without any; `active`: number of experts per token.
        intermediates: widths of the MLP, and of an expert if there are any; 0 if no block has an MLP.
        shared: width of the shared expert; 0 without one.
    """

    blocks: tuple[Attention | State | None, ...]
    hidden: int
    context: int | None
    itemsize: int
    experts: int
    active: int
    intermediates: tuple[int, ...]
    shared: int = 0

    def layers(self, tp: int, width: int | None = None, scale: int = 0, drafts: int = 0) -> list[CacheLayer]:
        """The cache of each block on one of `tp` devices.

        Args:
            width: bytes of a number; None: that of the model's dtype.
            scale: bytes of a scale per token and head, for keys and for values; 0 without scales.
            drafts: number of tokens drafted at a time.
        """
        layers = []
        for block in self.blocks:
            # A recurrent state has one size whatever the length; keys and values grow by the token, or up to a window.
            if isinstance(block, State):
                drafted = block.drafted * drafts // tp * block.parts[0][1]
                layers.append(CacheLayer(0, None, sum(n // tp * size for n, size in block.parts) + drafted))
            elif block:
                size = block.token_bytes(width or self.itemsize, scale, tp)
                layers.append(CacheLayer(size, block.window, 0, max(1, block.kv_heads // tp)))
        return layers


def require_counts(config: Mapping[str, Any], file: Path) -> None:
    """Raise `UserError` for a config.json with impossible counts in its text model."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UserError(f"{file}: text_config is no mapping; restore it from the source")
    restore = "restore it from the source"
    where = "text_config." if "text_config" in config else ""
    for key in (*_COUNTS, *_OPTIONAL, *_EXPERTS):
        value = text.get(key)
        if value is None or (key in _EXPERTS and value == 0):
            continue
        if type(value) is not int or value <= 0:
            raise UserError(
                f"{file}: {where}{key} is {value!r}, not a whole number above zero; restore it from the source"
            )
    vision: Any = config.get("vision_config")
    for key in _VISION if isinstance(vision, Mapping) else ():
        for value in sizes if isinstance(sizes := vision.get(key), list) else [sizes]:
            if value is not None and (type(value) is not int or value <= 0):
                raise UserError(f"{file}: vision_config.{key} is {value!r}, not a whole number above zero; {restore}")
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if hidden and heads and not text.get("head_dim") and hidden % heads:
        raise UserError(
            f"{file}: {where}hidden_size {hidden} is no multiple of num_attention_heads {heads}; restore it from the source"
        )
    if heads and (few := text.get("num_key_value_heads")) and heads % few:
        raise UserError(
            f"{file}: {where}num_attention_heads {heads} is no multiple of num_key_value_heads {few}; restore it from "
            "the source"
        )


def describe(model: PreTrainedModel) -> ServedDecoder:
    """Describe the decoder of a model, which may be on the meta device."""
    config: Any = model.config.get_text_config()
    blocks = list(model.get_decoder().layers)
    # transformers names each block's kind in `layer_types`; older configs have one window for all, or a switch for it.
    sliding = getattr(config, "sliding_window", None)
    whole = "sliding_attention" if sliding and getattr(config, "use_sliding_window", True) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [whole] * len(blocks)
    itemsize = min(_ITEMSIZE.get(str(model.dtype).removeprefix("torch."), 2), 2)
    experts, active = (
        next((value for key in keys if (value := getattr(config, key, None))), 0) for keys in (_EXPERTS, _ACTIVE)
    )
    return ServedDecoder(
        blocks=tuple(_block(block, kind, config, sliding, itemsize) for block, kind in zip(blocks, kinds, strict=True)),
        hidden=config.hidden_size,
        context=getattr(config, "max_position_embeddings", None),
        itemsize=itemsize,
        experts=experts,
        active=active if experts else 0,
        intermediates=tuple(
            value if type(value := getattr(config, key, None)) is int else 0
            for key in ("intermediate_size", *(("moe_intermediate_size",) if experts else ()))
        ),
        shared=(getattr(config, "shared_expert_intermediate_size", None) or 0) if experts else 0,
    )


def tp_problem(decoder: ServedDecoder, tp: int) -> str | None:
    """Why the decoder cannot be split over `tp` devices as vLLM does it; None when it can."""
    for block in decoder.blocks:
        if isinstance(block, Attention):
            if block.heads % tp:
                return f"{block.heads} attention heads"
            # vLLM copies heads of keys and values where there are fewer than devices (`QKVParallelLinear`).
            if block.kv_heads % tp and tp % block.kv_heads:
                return f"{block.kv_heads} heads of keys and values"
        elif block and block.heads % tp:
            return f"{block.heads} heads of a recurrent block"
    if decoder.experts and tp > decoder.experts:
        return f"{decoder.experts} experts, which are fewer than devices"
    sizes = (*decoder.intermediates, decoder.shared)
    return next((f"an intermediate size of {size}" for size in sizes if size % tp), None)


def tp_problem_message(decoder: ServedDecoder, tp: int) -> str | None:
    """`tp_problem` as a message, with the numbers of devices that work; None if there is no problem."""
    problem = tp_problem(decoder, tp)
    fine = ", ".join(map(str, tp_choices(decoder))) if problem else ""
    return f"--tp {tp} does not go with {problem}; use one of {fine}" if problem else None


def tp_choices(decoder: ServedDecoder) -> list[int]:
    """Numbers of devices, up to 16, that the decoder can be split over."""
    return [tp for tp in range(1, 17) if tp_problem(decoder, tp) is None]


def _block(block: nn.Module, kind: str, config: Any, window: int | None, itemsize: int) -> Attention | State | None:
    if kind == "linear_attention":
        return _delta_net(config, itemsize)
    if kind == "conv":
        width = getattr(config, "conv_dim", None) or config.hidden_size
        return State(((width * (config.conv_L_cache - 1), itemsize),), width, width)
    modules = dict(block.named_modules())
    name = next((name for name in modules if name.rpartition(".")[2] == "k_proj"), None)
    if name is None:
        return None
    attention: Any = modules[name.rpartition(".")[0]]
    if getattr(attention, "is_kv_shared_layer", False):
        return None
    dim = getattr(attention, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: Any = modules[name]
    queries = getattr(config, "num_attention_heads", None) or attention.q_proj.out_features // dim
    return Attention(queries, keys.out_features // dim, dim, window if kind == "sliding_attention" else None)


def _delta_net(config: Any, itemsize: int) -> State:
    """State of a Gated DeltaNet block: the last inputs of its convolution, and a matrix per value head.

    Source: vLLM 0.32 `model_executor/layers/mamba/mamba_utils.py`, `gated_delta_net_state_shape`. The matrices have the type
    `mamba_ssm_dtype`, which released models name (float32), or the model's own; without it vLLM stores float32 on a processor
    with AVX-512 BF16 (`platforms/cpu.py`).
    """
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    wide = _ITEMSIZE.get(str(getattr(config, "mamba_ssm_dtype", "") or ""), itemsize)
    channels = 2 * keys + values
    return State(
        ((channels * (config.linear_conv_kernel_dim - 1), itemsize), (values * config.linear_key_head_dim, wide)),
        math.gcd(config.linear_num_key_heads, config.linear_num_value_heads),
        channels,
    )


@dataclass(frozen=True)
class ServedModel:
    """A model to be served.

    Attributes:
        path: its folder.
        config: the content of config.json.
        meta_model: the model on the meta device, shapes only.
        decoder: its decoder.
        stored: tensor -> type and shape, from disk or derived from the config.
        headers: whether there are weight files.
        spec: its family; None: unknown to this package, so its weights are not quantized.
        pictures: the family whose rule determines visual tokens (Qwen3-VL for all models with its tower); None: unknown.
        source: the checkpoint for planning; None if it is quantized or its family is unknown.
        quantized: its quantization method; empty: none.
    """

    path: Path
    config: dict[str, Any]
    meta_model: PreTrainedModel
    decoder: ServedDecoder
    stored: dict[str, Spec]
    headers: bool
    spec: ModelSpec | None
    source: Source | None
    pictures: ModelSpec | None
    quantized: str = ""

    def tower_problem(self, devices: int) -> str | None:
        """Why vLLM cannot split the vision tower over devices; None if it can, or if the family is unknown."""
        if devices == 1 or self.spec is None:
            return None
        return partition.tower_problem(self.meta_model, self.spec, {}, devices)


def read_served_model(path: Path) -> ServedModel:
    """Open the model in a folder. Raises `UserError` for an invalid config."""
    weights = has_weights(path)
    config = models.read_config(path, weights)
    require_counts(config, path / "config.json")
    try:
        spec = models.spec_for(config)
    except UserError:
        spec = None
    quantization = config.get("quantization_config") or {}
    quantized = str(quantization.get("quant_method") or "quantized") if quantization else ""
    if spec and not quantized:
        source = Source.of(path) if weights else Source.outline(path)
        described = describe(source.meta_model)
        return ServedModel(path, config, source.meta_model, described, source.stored, weights, spec, source, spec)
    meta_model = models.build_meta_model(path, weights, supported_only=False)
    if weights:
        headers = models.tensor_headers(path)
        stored = {name: Spec(entry["dtype"], tuple(entry["shape"])) for name, entry in headers.items()}
    elif quantized:
        raise UserError(
            f"{path} is quantized and has no weight files that show its size; download them, or plan the original"
        )
    else:
        tied = models.tied_names(meta_model)
        stored = {name: Spec.of(tensor) for name, tensor in meta_model.state_dict().items() if name not in tied}
    pictures = spec
    for other in (
        models.all_specs() if spec is None else ()
    ):  # identify an unknown model's tower by the class of its blocks
        with contextlib.suppress(AttributeError, IndexError):
            blocks: Any = meta_model.get_submodule(other.vision_layers)
            if other.tower.blocks and other.tower.blocks in type(blocks[0]).__name__:
                pictures = other
                break
    return ServedModel(path, config, meta_model, describe(meta_model), stored, weights, spec, None, pictures, quantized)
