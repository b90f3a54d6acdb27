"""Plan the serving of a model: what fits, for how many requests at once, and no faster than what.

    memory for vLLM = utilization * memory of a device
    space of the cache = that - weights - encoder cache - reserve
    reserve = 1.5 GB (context, graphs, libraries) + activations of the largest step + logits

The reserve is an estimate, which `--reserve` replaces; vLLM measures the real one when it starts. Memory as sold counts in
units of 10^9 bytes, which is a little less than devices report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlmcompress.checkpoint import reducer_block
from vlmcompress.common.text import size
from vlmcompress.engines.vllm.plugin import refusal as unserved
from vlmcompress.errors import UserError
from vlmcompress.hf_hooks.support import refusal
from vlmcompress.planning import cache_pool, kv_cache, roofline, served_model, weight_bytes
from vlmcompress.planning.cache_pool import Defaults, Pool
from vlmcompress.planning.findings import MEMORY_SHARE
from vlmcompress.planning.served_model import Model
from vlmcompress.planning.visual_count import Counted, Pictures, Rule, kept, per_block
from vlmcompress.planning.weight_bytes import Speculation, Weights
from vlmcompress.recipe.reducer import ReducerChoice
from vlmcompress.targets import Target

FIXED = 1_500_000_000
"""Bytes of a process that are neither weights nor cache nor activations: an assumption."""


@dataclass(frozen=True)
class Request:
    """What is asked: one request's `pictures`, `text` and `out` tokens, and the machine.

    `speculative`: method of speculative decoding, and how many tokens are drafted at once. `memory`, `reserve`, `space`:
    bytes of a device, of the reserve and of the cache, in place of what is worked out.
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
    memory: int | None = None
    reserve: int | None = None
    space: int | None = None


@dataclass(frozen=True)
class Load:
    """One request: its tokens, the bytes that they fill on a device, and the blocks that vLLM gives it."""

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
class Served:
    """What a format gives for a load: requests at once, and bounds in seconds, None where the machine's rates are not known.

    `prefill`: of one prompt; `step`: of one token for one request; `full_step`: of one token for all requests at once.
    """

    requests: float
    prefill: float | None
    step: float | None
    full_step: float | None


@dataclass(frozen=True)
class Row:
    """A format on a device: bytes of its weights, bytes left for the cache, and what it serves, by load."""

    weights: Weights
    device: int
    space: int | None
    served: Mapping[str, Served] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether at least one request can be served, of each load."""
        return bool(self.served) and all(found.requests >= 1 for found in self.served.values())


@dataclass(frozen=True)
class Capacity:
    """The plan. `loads`: by name, `all` and, behind a reducer, its label. `notes`: what was assumed or is to be known.

    `head_token_bytes`: what of `token_bytes` is of a head that drafts.
    """

    request: Request
    model: Model
    defaults: Defaults
    memory: float | None
    reserve: int
    encoder: int
    token_bytes: int
    state_bytes: int
    pool: Pool
    loads: Mapping[str, Load]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    speculation: Speculation | None = None
    head_token_bytes: int = 0

    @property
    def served(self) -> str:
        """Name of the load that is served: behind the reducer where there is one."""
        return list(self.loads)[-1]

    @property
    def best(self) -> Row | None:
        """The format to take: the target's own choice, then its choice for memory, then the smallest that fits."""
        fitting = [row for row in self.rows if row.fits]
        schemes = self.request.target.schemes if self.request.target else {}
        for goal in (None, "memory"):
            for row in fitting:
                if schemes.get(goal) in (row.weights.name, *row.weights.others):
                    return row
        return min(fitting, key=lambda row: row.device, default=None)


def plan_capacity(
    model: Model, asked: Request, rows: bool = True, formats: Sequence[Weights] | None = None
) -> Capacity:
    """Work out the plan. UserError for what cannot be asked: too long a context, devices that the heads do not divide by.

    Args:
        rows: False: loads alone, without formats. `formats`: those to have rows for; None: all that schemes give.
    """
    described = model.decoder
    if problem := served_model.tp_refusal(described, asked.tp):
        raise UserError(problem)
    notes: list[str] = []
    if model.spec is None and model.pictures and (asked.pictures.images or asked.pictures.video):
        notes.append(f"images are counted by the rule of {model.pictures.family}, whose tower the model has")
    if asked.reduce is None and (carried := reducer_block.read(model.config)):
        asked = replace(asked, reduce=carried.reducer)
        notes.append(f"the checkpoint carries {carried.reducer.label}")
    counted, left = _count(model, asked, notes)
    memory = asked.memory or (asked.target.memory * 1e9 if asked.target and asked.target.memory else None)
    usual = cache_pool.defaults(asked.target, memory)
    kind = kv_cache.width(asked.kv_cache)
    drafting = weight_bytes.speculation_of(model, *asked.speculative) if asked.speculative else None
    drafts = drafting.tokens if drafting else 0
    own = described.layers(asked.tp, kind.number, kind.scale, drafts)
    layers = drafting.added(described).layers(asked.tp, kind.number, kind.scale, drafts) if drafting else own
    pool = cache_pool.pool(layers, usual.block, usual.kernel, drafts=drafts)
    visual = {"all": counted.tokens} | ({str(asked.reduce): left} if asked.reduce and left is not None else {})
    loads = {name: _load(pool, layers, tokens, asked, usual) for name, tokens in visual.items()}
    _check_context(described.context, loads)
    largest = max(counted.largest, 1)
    if asked.reduce and left is not None and counted.tokens:
        largest = math.ceil(largest * left / counted.tokens)
    wide = model.config.get("vision_config") or {}
    deep = 1 + len(wide.get("deepstack_visual_indexes") or [])
    pictures = bool(asked.pictures.images or asked.pictures.video)
    encoder = (
        cache_pool.encoder_embeddings(usual, largest) * described.hidden * described.itemsize * deep if pictures else 0
    )
    reserve = asked.reserve if asked.reserve is not None else _reserve(model, usual, counted, asked)
    scales = kv_cache.has_scales(model.config)
    notes += kv_cache.remarks(asked.kv_cache, kv_cache.normalizes(model.meta_model), asked.target, scales)
    found = Capacity(
        asked,
        model,
        usual,
        memory,
        reserve,
        encoder,
        sum(layer.token_bytes for layer in layers),
        sum(layer.state_bytes for layer in layers),
        pool,
        loads,
        (),
        tuple(notes),
        drafting,
        sum(layer.token_bytes for layer in layers[len(own) :]),
    )
    if not rows:
        return found
    every = [_split(one, described, asked.tp) for one in formats or weight_bytes.formats(model, asked.target_name)]
    return replace(found, rows=tuple(_row(found, counted, one) for one in every))


def _count(model: Model, asked: Request, notes: list[str]) -> tuple[Counted, int | None]:
    """The visual tokens of a request, and those that its reducer leaves; None without one, or where it depends on the image."""
    if not asked.pictures.images and not asked.pictures.video:
        return Counted((), None, 0, (), 0), None
    rule = Rule(model.path, model.config, model.pictures)
    notes += rule.notes
    counted = rule.count(asked.pictures)
    chosen = asked.reduce
    if chosen is None:
        return counted, None
    if model.spec is None:
        raise UserError(
            f"--reduce {chosen}: the family '{model.config.get('model_type')}' is not one that is reduced here"
        )
    if reason := refusal(model.spec, chosen.method):
        raise UserError(f"--reduce {chosen}: {reason}")
    for name in model.config.get("architectures") or []:
        if reason := unserved(name.removeprefix(reducer_block.PREFIX), chosen):
            raise UserError(f"--reduce {chosen}: {reason}")
    left = kept(counted, chosen, model.spec)
    if left is None:
        notes.append(f"how many tokens {chosen} leaves depends on what an image shows; figures are those of all tokens")
    return counted, left


def _load(pool: Pool, layers: list[cache_pool.Layer], visual: int, asked: Request, usual: Defaults) -> Load:
    context = visual + asked.text + asked.out
    flight = usual.in_flight(context)
    filled = cache_pool.tokens_bytes(layers, context)
    return Load(
        visual, asked.text, asked.out, filled, pool.blocks(context, flight), pool.request_bytes(context, flight)
    )


def _check_context(most: int | None, loads: Mapping[str, Load]) -> None:
    context = list(loads.values())[-1].context
    if most and context > most:
        raise UserError(
            f"a request has {context:,} tokens and the model takes {most:,} (max_position_embeddings); use smaller or fewer "
            "images, --reduce, fewer --text-tokens or --out-tokens"
        )


def _reserve(model: Model, usual: Defaults, counted: Counted, asked: Request) -> int:
    """The reserve of the module's docstring: activations are 2 bytes times 6 widths and 3 intermediate ones of each token."""
    text: Any = model.meta_model.config.get_text_config()
    about = model.decoder
    wide = max(
        about.intermediates[:1] + tuple(size * max(about.active, 1) for size in about.intermediates[1:]), default=0
    )
    activations = 2 * usual.batched * (6 * about.hidden + 3 * wide // asked.tp)
    vision = model.config.get("vision_config") or {}
    patches = max(counted.patches, default=0)
    seen = 2 * patches * (6 * int(vision.get("hidden_size") or 0) + 3 * int(vision.get("intermediate_size") or 0))
    return FIXED + max(activations, seen) + 8 * usual.sequences * int(getattr(text, "vocab_size", 0))


def _split(row: Weights, described: served_model.Decoder, tp: int) -> Weights:
    """A format that is refused where its experts cannot be split."""
    problem = None if row.refused else served_model.group_problem(described, tp, row.scheme)
    return replace(row, refused=problem, stored=None) if problem else row


def _row(found: Capacity, counted: Counted, row: Weights) -> Row:
    """What a format leaves and serves."""
    asked, model = found.request, found.model
    if row.stored is None:
        return Row(row, 0, None)
    heads = min(
        (block.kv_heads for block in model.decoder.blocks if isinstance(block, served_model.Attention)), default=1
    )
    head = found.speculation.bytes if found.speculation else 0
    loaded = weight_bytes.loaded_bytes(row, model.stored) - weight_bytes.draft_bytes(model) + head
    device = weight_bytes.device_bytes(loaded, model.stored, asked.tp, heads)
    space = asked.space
    if space is None and found.memory is not None:
        space = int(MEMORY_SHARE * found.memory) - device - found.encoder - found.reserve
    if space is None:
        return Row(row, device, None)
    served = {name: _served(found, counted, row, loaded, space, load) for name, load in found.loads.items()}
    return Row(row, device, space, served)


def _served(found: Capacity, counted: Counted, row: Weights, loaded: int, space: int, load: Load) -> Served:
    asked, model = found.request, found.model
    one = found.pool.block_bytes  # vLLM keeps one block for itself
    enough = space - one >= load.bytes
    requests = found.pool.requests(space, load.context, found.defaults.in_flight(load.context)) if enough else 0
    target = asked.target
    if target is None or not enough:
        return Served(float(requests), None, None, None)
    known = row.key != weight_bytes.QUANTIZED
    kind = roofline.arithmetic_type(row.scheme)
    visual = per_block(counted, load.visual, asked.reduce, len(model.decoder.blocks))
    done = roofline.work(model, visual, load.text, counted.patches, counted.tokens)
    head = found.speculation.bytes if found.speculation else 0
    about = roofline.read(model, loaded - head)
    per_token = done.linear / max(load.visual + load.text, 1)
    many = max(1, min(math.floor(requests), found.defaults.sequences))
    copies = (
        load.filled - found.head_token_bytes * load.context
    ) * asked.tp  # what all devices read of one sequence's cache
    steps = [
        roofline.decode_seconds(
            roofline.step_bytes(about, model, n, copies),
            n * per_token,
            target.bandwidth,
            target.rates.get(kind) if known else None,
            asked.tp,
        )
        for n in (1, many)
    ]
    prefill = roofline.prefill_seconds(done, target.rates, kind, asked.tp) if known else None
    return Served(float(requests), prefill, *steps)


def verdict(found: Capacity) -> str:
    """In words, whether the model can be served so, and what would help where it cannot."""
    if found.best:
        return f"{found.best.weights.name} fits"
    if all(row.space is None for row in found.rows if row.weights.stored is not None):
        return "how much memory the machine has is not known; name it with --memory or --kv-cache-memory"
    smallest = min((row for row in found.rows if row.weights.stored is not None), key=lambda row: row.device)
    need = smallest.device + found.encoder + found.reserve + found.loads[found.served].bytes + found.pool.block_bytes
    wanted = need / MEMORY_SHARE
    one, left = size(found.loads[found.served].bytes), size(found.reserve)
    return (
        f"nothing fits: {smallest.weights.name}, the smallest format, takes {size(smallest.device)} of weights, {left} of "
        f"reserve and {one} for one request, which needs a device of {size(wanted)}; use more devices (--tp), a larger "
        "target, or shorter requests"
    )
