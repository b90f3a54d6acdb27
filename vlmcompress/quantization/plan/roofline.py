"""Roofline bounds: no engine is faster than its machine's arithmetic and memory allow.

    prefill >= 2 * (multiply-adds of the decoder's linear layers / rate of the format
                    + (attention + vision tower) / rate of BF16)
    multiply-adds of a block for n tokens: n * (entries of its linear layers), and of its attention
        2 * (width of the queries) * (pairs of a token and one that it attends to)
    a decoding step >= max(bytes of weights and cache that it reads / bandwidth, its arithmetic / rate)

A token meets those experts alone that it is sent to, and a step reads at least as many as one token meets. What a short
convolution takes is left out: it is small next to the linear layers. The figures are bounds: launches, communication, and
kernels short of the peak come on top of them (Williams, Waterman, Patterson: Roofline, doi:10.1145/1498765.1498785).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vlmcompress import models
from vlmcompress.engines.vllm.served_model import Attention, ServedDecoder, ServedModel, State
from vlmcompress.numerics import Scheme

_TOWER = re.compile(r"(^|\.)(visual|vision\w*|multi_modal_projector|image_newline|connector|embed_vision)(\.|$)")
_EXPERTS = re.compile(r"\.experts(\.|$)")


@dataclass(frozen=True)
class Block:
    """A decoder block: entries of its linear layers that a token meets, width of its queries, and its window.

    `state`: entries of a recurrent state, each of which is multiplied by something twice for each token.
    """

    entries: int
    queries: int
    window: int | None
    state: int


@dataclass(frozen=True)
class Work:
    """Multiply-adds of a prompt: of linear layers in the decoder, of its attention, of the vision tower and projector."""

    linear: int
    attention: int
    tower: int


def arithmetic_type(scheme: Scheme | None) -> str:
    """The type that a linear layer of this scheme multiplies in: a key of `Target.rates`."""
    if scheme is None or scheme.activations is None:
        return "bf16"
    bits, kind = scheme.activations.bits, scheme.activations.kind
    return f"int{bits}" if kind == "int" else f"fp{bits}"


def blocks(meta_model: Any, decoder: ServedDecoder) -> list[Block]:
    """Describe the blocks of a model's decoder, in which a token meets `active` of the experts."""
    counts = []
    for block, about in zip(meta_model.get_decoder().layers, decoder.blocks, strict=True):
        entries = 0
        for name, weight in block.named_parameters():
            routed = decoder.experts and _EXPERTS.search(f".{name}")
            if weight.dim() == 2 or routed:
                entries += weight.numel() * decoder.active // decoder.experts if routed else weight.numel()
        queries = about.heads * about.head_dim if isinstance(about, Attention) else 0
        window = about.window if isinstance(about, Attention) else None
        state = sum(size for size, _ in about.parts) if isinstance(about, State) else 0
        counts.append(Block(entries, queries, window, state))
    return counts


def decoder_work(blocks: Sequence[Block], lengths: Sequence[int]) -> tuple[int, int]:
    """Multiply-adds of the blocks' linear layers and of their attention for one prompt of `lengths` tokens, by block."""
    linear = attention = 0
    for block, n in zip(blocks, lengths, strict=True):
        span = min(n, block.window or n)
        linear += n * block.entries
        # Causal attention: token i meets min(i, span) tokens, which are span (span + 1) / 2 + (n - span) span pairs. Each is
        # a multiply-add for its score and one for the weighted values.
        attention += 2 * block.queries * (span * (span + 1) // 2 + (n - span) * span) + 2 * n * block.state
    return linear, attention


def work(model: ServedModel, visual: Sequence[int], text: int, patches: Sequence[int], full: int) -> Work:
    """Multiply-adds of the prefill of one prompt.

    Args:
        visual: visual tokens in each decoder block.
        text: other tokens.
        patches: patches of each picture that the encoder sees by itself.
        full: visual tokens before any reducer, all of which go through the projector.
    """
    linear, attention = decoder_work(blocks(model.meta_model, model.decoder), [count + text for count in visual])
    head = model.meta_model.get_output_embeddings()
    linear += head.weight.numel() if head is not None else 0  # of the last token alone
    return Work(linear, attention, tower(model, patches, full))


def tower(model: ServedModel, patches: Sequence[int], tokens: int) -> int:
    """Multiply-adds of the vision tower on pictures of so many patches each, and of the projector on `tokens` tokens."""
    spec = model.pictures
    if spec is None or not patches:
        return 0
    layers = models.tower_blocks(model.meta_model, spec)
    vision = getattr(model.meta_model.config, "vision_config", None)
    inside = {id(module) for block in layers for module in block.modules()}
    named = dict(model.meta_model.named_modules())
    projectors = [named[name] for name in spec.projector if name in named]
    of_tokens = {id(module) for root in projectors for module in root.modules()}
    total = 0
    for root in [model.meta_model.get_submodule(name) for name in spec.vision]:
        for module in root.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d) and id(module) not in inside | of_tokens:
                total += sum(patches) * module.weight.numel()
    total += tokens * sum(_linear(root) for root in projectors)
    # Qwen2.5-VL: blocks whose number is not in `fullatt_block_indexes` attend within windows of `window_size` pixels.
    wide = getattr(vision, "fullatt_block_indexes", None)
    window = (
        None if vision is None or wide is None else (vision.window_size // models.side_length(vision.patch_size)) ** 2
    )
    for index, block in enumerate(layers):
        side = None if wide is None or index in wide else window
        hidden = next(m.in_features for m in block.modules() if isinstance(m, nn.Linear))
        total += sum(patches) * _linear(block)
        total += sum(2 * hidden * n * min(n, side or n) for n in patches)
    return total


def _linear(root: nn.Module) -> int:
    return sum(module.weight.numel() for module in root.modules() if isinstance(module, nn.Linear))


def step_bytes(model: ServedModel, loaded: int, sequences: int, cache: float) -> float:
    """Bytes that a decoding step reads at least: all sequences may meet the same experts. Neither the tower nor an embedding
    that is not the head is read.

    Args:
        loaded: bytes of weights, an MTP head's not among them.
        cache: bytes of one sequence's cache.
    """
    names = {model.source.names.get(name, name): name for name in model.source.names} if model.source else {}
    tied = bool(models.tied_names(model.meta_model))
    mtp = set(models.mtp_tensors(model.spec, model.stored)) if model.spec else set[str]()
    aside = routed = decoder = 0
    for disk, spec in model.stored.items():
        name = names.get(disk, disk)
        if disk in mtp:
            continue
        if _TOWER.search(name) or ("embed_tokens" in name and not tied):
            aside += spec.nbytes
            continue
        decoder += spec.nbytes
        routed += spec.nbytes if _EXPERTS.search(name) else 0
    # What is loaded may be quantized: the source's shares of it are taken for those of the files.
    of_experts = routed / max(decoder, 1)
    met = model.decoder.active / model.decoder.experts if model.decoder.experts else 1.0
    return max(loaded - aside, 0) * (1 - of_experts + of_experts * met) + sequences * cache


def prefill_seconds(prompt: Work, rates: Mapping[str, float], kind: str) -> float | None:
    """The bound of a prefill; None where the machine's rates are not known."""
    fast, usual = rates.get(kind), rates.get("bf16")
    if not fast or not usual:
        return None
    return 2 * (prompt.linear / fast + (prompt.attention + prompt.tower) / usual) / 1e12


def decode_seconds(
    bytes_read: float, multiply_adds: float, bandwidth: float | None, rate: float | None
) -> float | None:
    """The bound of one decoding step; None where the bandwidth is not known."""
    if not bandwidth:
        return None
    arithmetic = 2 * multiply_adds / (rate * 1e12) if rate else 0.0
    return max(bytes_read / (bandwidth * 1e9), arithmetic)
