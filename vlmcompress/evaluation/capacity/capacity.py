"""Plan the serving of a model: whether it fits, and how many requests at once.

    memory for vLLM = utilization * memory of a device
    space of the KV cache = memory for vLLM - weights - encoder cache - reserve
    reserve = 1.5 GB (context, graphs, libraries) + activations of the largest step + logits

The reserve is an estimate, which `--reserve` replaces; vLLM measures it when it starts. Advertised memory is in units of 10^9
bytes, slightly less than devices report.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlmcompress.engines.vllm import served_model
from vlmcompress.engines.vllm.served_model import ServedModel
from vlmcompress.evaluation.capacity import cache_pool, weight_bytes
from vlmcompress.evaluation.capacity.cache_pool import Defaults, Pool
from vlmcompress.evaluation.capacity.weight_bytes import Speculation, Weights
from vlmcompress.export.draft_folder import Draft
from vlmcompress.models import VLM
from vlmcompress.quantization.plan import kv_cache
from vlmcompress.quantization.plan.examine import MEMORY_SHARE
from vlmcompress.recipe.targets import Target
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import support
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.visual_count import Counted, CountRule, Pictures, kept_tokens
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.text import size

FIXED = 1_500_000_000
"""Assumed bytes of a process that are neither weights nor cache nor activations."""


@dataclass(frozen=True)
class CapacityRequest:
    """The input of a plan: one request's `pictures`, `text` and `out` tokens, and the machine.

    `speculative`: method of speculative decoding, and number of drafted tokens; `draft`: a draft head in a separate folder.
    `memory`, `reserve`, `space`: bytes of a device, the reserve and the cache, which replace the computed ones. `vocabulary`:
    formats of a recipe's `head` and `embeddings`, for all rows except the 16-bit one.
    """

    pictures: Pictures
    text: int
    out: int
    target: Target | None = None
    target_name: str | None = None
    tp: int = 1
    kv_cache: str = "auto"
    reduce: ReducerChoice | None = None
    speculative: tuple[str, int] | None = None
    draft: Draft | None = None
    memory: int | None = None
    reserve: int | None = None
    space: int | None = None
    vocabulary: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """One request: its tokens, the bytes that they fill on a device, and the cache blocks that vLLM allocates for it."""

    visual: int
    text: int
    out: int
    filled: int
    blocks: int
    bytes: int

    @property
    def context(self) -> int:
        """All its tokens."""
        return self.visual + self.text + self.out


@dataclass(frozen=True)
class FormatRow:
    """A format on a device: bytes of its weights, bytes left for the cache, and the requests at once, by load."""

    weights: Weights
    device: int
    space: int | None
    requests: Mapping[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether at least one request of each load can be served."""
        return bool(self.requests) and all(requests >= 1 for requests in self.requests.values())


@dataclass(frozen=True)
class Capacity:
    """The plan. `loads`: by name, `all` and, with a reducer, its label. `notes`: assumptions and remarks.

    `counted`: visual tokens before the reducer; `head_token_bytes`: the part of `token_bytes` for a draft head.
    """

    request: CapacityRequest
    model: ServedModel
    defaults: Defaults
    memory: float | None
    reserve: int
    encoder: int
    token_bytes: int
    state_bytes: int
    pool: Pool
    loads: Mapping[str, Load]
    counted: Counted
    rows: tuple[FormatRow, ...]
    notes: tuple[str, ...]
    speculation: Speculation | None = None
    head_token_bytes: int = 0

    @property
    def model_name(self) -> str:
        """The model's display name."""
        return hub.display_path(self.model.path)

    @property
    def served(self) -> str:
        """Name of the served load: that with the reducer, if there is one."""
        return list(self.loads)[-1]

    @property
    def speeds(self) -> Mapping[str, float]:
        """Format -> its measured speed on the target as a multiple of BF16's; empty without a measurement."""
        return self.request.target.speeds if self.request.target else {}

    @property
    def best(self) -> FormatRow | None:
        """The recommended format of those that fit; None: none does.

        It is the fastest of the formats whose speed was measured on the target; without a measurement the target's default,
        else its choice for memory, else the smallest.
        """
        fitting = [row for row in self.rows if row.fits]
        if measured := [row for row in fitting if row.weights.key in self.speeds]:
            return max(measured, key=lambda row: self.speeds[row.weights.key])
        schemes = self.request.target.schemes if self.request.target else {}
        for goal in (None, "memory"):
            for row in fitting:
                if schemes.get(goal) in (row.weights.name, *row.weights.others):
                    return row
        return min(fitting, key=lambda row: row.device, default=None)


def plan_capacity(model: ServedModel, request: CapacityRequest, formats: Sequence[Weights] | None = None) -> Capacity:
    """Compute the plan. Raises `UserError` for an impossible request, e.g. too long a context or an indivisible number of
    heads.

    Args:
        formats: the formats of rows; None: all formats of schemes.
    """
    if problem := served_model.tp_problem_message(model.decoder, request.tp):
        raise UserError(problem)
    notes: list[str] = []
    if model.spec is None and model.pictures and (request.pictures.images or request.pictures.video):
        notes.append(f"images are counted by the rule of {model.pictures.family}, whose tower the model has")
    if request.reduce is None and (carried := reducer_block.read_reducer(model.config)):
        request = replace(request, reduce=carried.reducer)
        notes.append(f"the checkpoint carries {carried.reducer.label}")
    counted, left = _count(model, request, notes)
    memory: float | None = request.memory
    if memory is None and request.target and request.target.memory:
        memory = request.target.memory * 1e9
    elif memory is None and request.target and request.target.is_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        notes.append(f"{size(memory)} is the memory of this machine; give another's with --memory")
    defaults = cache_pool.defaults(request.target, memory)
    cache_type = kv_cache.width(request.kv_cache)
    speculation = weight_bytes.speculation_of(model, *request.speculative) if request.speculative else None
    if request.draft:
        speculation = weight_bytes.speculation_by(model, request.draft)
    drafts = speculation.tokens if speculation else 0
    with_head = speculation.added(model.decoder) if speculation else model.decoder
    layers = with_head.layers(request.tp, cache_type.number, cache_type.scale, drafts)
    head_layers = layers[len(layers) - len(speculation.blocks) :] if speculation else []
    pool = cache_pool.pool(layers, defaults.block, defaults.kernel, drafts=drafts)
    visual = {"all": counted.tokens} | ({str(request.reduce): left} if request.reduce and left is not None else {})
    loads = {}
    for name, tokens in visual.items():
        context = tokens + request.text + request.out
        in_flight, filled = defaults.in_flight(context), cache_pool.tokens_bytes(layers, context)
        blocks = pool.blocks(context, in_flight)
        loads[name] = Load(tokens, request.text, request.out, filled, blocks, blocks * pool.block_bytes)
    if model.decoder.context and context > model.decoder.context:  # of the last load, the one that is served
        raise UserError(
            f"a request has {context:,} tokens and the model takes {model.decoder.context:,} (max_position_embeddings); use "
            "smaller or fewer images, --reduce, fewer --text-tokens or --out-tokens"
        )
    encoder = _encoder_bytes(model, defaults, request, counted, left)
    reserve = request.reserve if request.reserve is not None else _reserve(model, defaults, counted, request.tp)
    scales = kv_cache.has_scales(model.config)
    notes += kv_cache.remarks(request.kv_cache, kv_cache.normalizes(model.meta_model), request.target, scales)
    capacity = Capacity(
        request=request,
        model=model,
        defaults=defaults,
        memory=memory,
        reserve=reserve,
        encoder=encoder,
        token_bytes=sum(layer.token_bytes for layer in layers),
        state_bytes=sum(layer.state_bytes for layer in layers),
        pool=pool,
        loads=loads,
        counted=counted,
        rows=(),
        notes=tuple(notes),
        speculation=speculation,
        head_token_bytes=sum(layer.token_bytes for layer in head_layers),
    )
    formats = formats or weight_bytes.formats(model, request.target_name, request.tp, request.vocabulary)
    return replace(capacity, rows=tuple(_row(capacity, weights) for weights in formats))


def _count(model: ServedModel, request: CapacityRequest, notes: list[str]) -> tuple[Counted, int | None]:
    """The visual tokens of a request, and those after its reducer; None without one, or if that depends on the image."""
    if not request.pictures.images and not request.pictures.video:
        return Counted((), None, 0, (), 0), None
    rule = CountRule(model.path, model.meta_model.config, model.pictures)
    notes += rule.notes
    counted = rule.count(request.pictures)
    chosen = request.reduce
    if chosen is None:
        return counted, None
    if model.spec is None:
        raise UserError(
            f"--reduce {chosen}: the family '{model.config.get('model_type')}' is not one that is reduced here"
        )
    try:
        support.require_reducer(VLM(model.meta_model, None, model.spec, model.path), chosen, engine="vllm", files=False)
    except UserError as error:
        raise UserError(f"--reduce {chosen}: {error}") from error
    left = kept_tokens(counted, chosen, model.spec)
    if left is None:
        notes.append(f"how many tokens {chosen} leaves depends on what an image shows; figures are those of all tokens")
    return counted, left


def _encoder_bytes(
    model: ServedModel, defaults: Defaults, request: CapacityRequest, counted: Counted, left: int | None
) -> int:
    """Bytes of the encoder's cache; 0 without pictures. `left`: visual tokens after the reducer, or None."""
    if not request.pictures.images and not request.pictures.video:
        return 0
    largest = max(counted.largest, 1)
    if request.reduce and left is not None and counted.tokens:
        if model.spec:  # vLLM reserves what a request may set
            left = kept_tokens(counted, request.reduce.largest, model.spec) or left
        largest = math.ceil(largest * left / counted.tokens)
    # vLLM 0.32 `v1/core/encoder_cache_manager.py`: the cache holds a step's tokens, or one image where that is larger. Of
    # each it holds all levels (`models/qwen3_vl.py`, `models/granite4_vision.py`: `embed_multimodal`).
    levels = 1
    if model.pictures and model.pictures.images.levels:
        levels = model.pictures.images.levels(model.meta_model.config.to_dict())
    return max(defaults.batched, largest) * model.decoder.hidden * model.decoder.itemsize * levels


def _reserve(model: ServedModel, defaults: Defaults, counted: Counted, tp: int) -> int:
    """The reserve of the module's docstring; activations of a token are 2 bytes times 6 hidden and 3 intermediate sizes."""
    decoder = model.decoder
    experts = tuple(width * max(decoder.active, 1) for width in decoder.intermediates[1:])
    intermediate = max(decoder.intermediates[:1] + experts, default=0)
    decoder_activations = 2 * defaults.batched * (6 * decoder.hidden + 3 * intermediate // tp)
    vision = getattr(model.meta_model.config, "vision_config", None)
    tower_widths = 6 * getattr(vision, "hidden_size", 0) + 3 * getattr(vision, "intermediate_size", 0)
    tower_activations = 2 * max(counted.patches, default=0) * tower_widths
    text: Any = model.meta_model.config.get_text_config()
    # Float32 logits of a step's sequences, and their probabilities.
    logits = 8 * defaults.sequences * int(getattr(text, "vocab_size", 0))
    return FIXED + max(decoder_activations, tower_activations) + logits


def _row(capacity: Capacity, weights: Weights) -> FormatRow:
    """The row of a format: the space that its weights leave, and what it serves."""
    request, model = capacity.request, capacity.model
    if weights.stored is None:
        return FormatRow(weights, 0, None)
    kv_heads = [block.kv_heads for block in model.decoder.blocks if isinstance(block, served_model.Attention)]
    head = capacity.speculation.bytes if capacity.speculation else 0
    loaded = weight_bytes.loaded_bytes(weights, model.stored) - weight_bytes.mtp_bytes(model) + head
    device = weight_bytes.device_bytes(loaded, model.stored, request.tp, min(kv_heads, default=1))
    space = request.space
    if space is None and capacity.memory is not None:
        space = int(MEMORY_SHARE * capacity.memory) - device - capacity.encoder - capacity.reserve
    if space is None:
        return FormatRow(weights, device, None)
    requests = {}
    for name, load in capacity.loads.items():
        # vLLM's `v1/core/block_pool.py` keeps `null_block` for itself
        fits = space - capacity.pool.block_bytes >= load.bytes
        in_flight = capacity.defaults.in_flight(load.context)
        requests[name] = float(capacity.pool.requests(space, load.context, in_flight)) if fits else 0.0
    return FormatRow(weights, device, space, requests)


def capacity_verdict(capacity: Capacity) -> str:
    """A sentence on whether the model can be served, and otherwise on what would help."""
    if capacity.best:
        return f"{capacity.best.weights.name} fits"
    stored = [row for row in capacity.rows if row.weights.stored is not None]
    if all(row.space is None for row in stored):
        return "the machine's memory is unknown; give it with --memory or --kv-cache-memory"
    smallest, request_bytes = min(stored, key=lambda row: row.device), capacity.loads[capacity.served].bytes
    cache = request_bytes + capacity.pool.block_bytes
    device = (smallest.device + capacity.encoder + capacity.reserve + cache) / MEMORY_SHARE
    return (
        f"nothing fits: {smallest.weights.name}, the smallest format, takes {size(smallest.device)} of weights, "
        f"{size(capacity.reserve)} of reserve and {size(request_bytes)} for one request, which needs a device of "
        f"{size(device)}; use more devices (--tp), a larger target, or shorter requests"
    )
