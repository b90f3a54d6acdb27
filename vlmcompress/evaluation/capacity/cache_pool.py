"""Memory of keys, values and states in whole blocks, as vLLM 0.32 allocates it to requests.

All layers take blocks from one pool. A block of a layer is a *page*: `block` tokens of an attention layer, or the state of a
recurrent layer, padded to the common page size. Layers with equal requirements form groups of equal length, and each group has
its own block table, so

    bytes of a block = page * layers of the longest group
    blocks of a request of n tokens = sum over groups of
        ceil(n / block)                                           full attention
        ceil(min(window - 1 + in flight, n) / block) + 1          a sliding window
        2 (one of a cached prefix) + drafted tokens               a recurrent state
    requests at once = (bytes of the pool // bytes of a block) / blocks of a request

"In flight" are tokens that are scheduled but not finished: a sliding window layer frees blocks only after them.

Source: vLLM 0.32 `v1/core/kv_cache_utils.py` (`get_kv_cache_groups`, `unify_kv_cache_spec_page_size`,
`get_max_concurrency_for_kv_cache_config`), `v1/kv_cache_interface.py` (`max_memory_usage_bytes`) and
`platforms/interface.py` (`_align_hybrid_block_size`). `tests/quantization/plan/test_against_vllm.py` compares with its log.

`Defaults` has vLLM's defaults that affect memory and batches: `config/cache.py` (`gpu_memory_utilization`,
`DEFAULT_BLOCK_SIZE`), `engine/arg_utils.py` (`get_batch_defaults` of the OpenAI server), `platforms/cpu.py` (blocks of 128,
one batch at once), `config/vllm.py` (`max_concurrent_batches`: two on a GPU, where scheduling is asynchronous),
`config/scheduler.py` (the encoder cache holds as many embeddings as a batch has tokens, or one image if that is more).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from vlmcompress.engines.vllm.served_model import CacheLayer
from vlmcompress.recipe.targets import Target


@dataclass(frozen=True)
class Group:
    """Layers that share a block table: their number, tokens per block, the window, and states per sequence."""

    layers: int
    block: int
    window: int | None = None
    states: int = 0


@dataclass(frozen=True)
class Pool:
    """The layout of a model's cache: groups of layers, and the bytes of one block of the pool."""

    groups: tuple[Group, ...]
    block_bytes: int

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Most blocks that a request of `tokens` tokens takes."""
        count = 0
        for group in self.groups:
            if group.states:
                count += group.states
            elif group.window is None:
                count += math.ceil(tokens / group.block)
            else:  # the window may begin within a block
                count += math.ceil(min(group.window - 1 + in_flight, tokens) / group.block) + 1
        return count

    def requests(self, space: int, tokens: int, in_flight: int) -> Fraction:
        """Number of requests of `tokens` tokens that fit into a pool of `space` bytes; vLLM logs it as maximum concurrency."""
        if not self.groups:
            return Fraction(0)
        return Fraction(max(space, 0) // self.block_bytes, self.blocks(tokens, in_flight))


def tokens_bytes(layers: Sequence[CacheLayer], tokens: int) -> int:
    """Bytes for `tokens` tokens without rounding up to blocks: keys and values within each window, and states."""
    return sum(layer.state_bytes + layer.token_bytes * min(tokens, layer.window or tokens) for layer in layers)


def pool(layers: Sequence[CacheLayer], block: int, kernel: int, drafts: int = 0) -> Pool:
    """Compute the cache layout of these layers as vLLM does with its default of cached prefixes.

    Args:
        layers: the decoder's blocks on one device.
        block: the engine's initial number of tokens per block.
        kernel: the attention kernel needs a multiple of this number of tokens per block.
        drafts: number of tokens drafted at a time; a recurrent layer keeps one more state for each.
    """
    copies = 2 + drafts  # of a recurrent state: one is a cached prefix's
    states = max((layer.state_bytes for layer in layers), default=0)
    attention = [layer for layer in layers if layer.token_bytes]
    if states and attention:
        unit = max(kernel, block)
        # `platforms/interface.py::_align_hybrid_block_size`: attention's block grows until its page holds a recurrent state.
        needed = unit * math.ceil(states / (unit * attention[0].token_bytes))
        block = max(block, kernel * math.ceil(needed / kernel))
    pages = {layer: layer.token_bytes * block if layer.token_bytes else layer.state_bytes for layer in layers}
    largest = max(pages.values(), default=0)
    if not largest:
        return Pool((), 0)
    # Layers of one group share tokens per block, window, copies of a state, heads. A smaller page that divides the largest
    # gets more tokens; otherwise it is padded.
    counts = Counter(
        (
            block * (largest // pages[layer] if largest % pages[layer] == 0 else 1) if layer.token_bytes else 0,
            layer.window if layer.token_bytes else None,
            0 if layer.token_bytes else copies,
            layer.heads,
        )
        for layer in layers
    )
    full = all(layer.window is None and layer.token_bytes for layer in layers)
    if full or len(counts) == 1:  # different heads stay in one group, with separate pages
        states = 0 if layers[0].token_bytes else copies
        return Pool((Group(len(layers), block, layers[0].window, states),), sum(pages[layer] for layer in layers))
    # `v1/core/kv_cache_utils.py::_get_kv_cache_groups_uniform_page_size`: the group length is the smallest number of layers of
    # a kind, or the largest if that is less than 1.5 times as many, as padding then costs less than more groups.
    length = min(counts.values())
    if max(counts.values()) < length * 1.5:
        length = max(counts.values())
    groups = []
    for (tokens, window, kept, _), count in counts.items():
        number = math.ceil(count / length)
        groups += [Group(math.ceil(count / number), tokens, window, kept)] * number
    return Pool(tuple(groups), largest * max(group.layers for group in groups))


GIB = 2**30


@dataclass(frozen=True)
class Defaults:
    """vLLM's defaults on a machine.

    Attributes:
        block: tokens per block; `kernel`: its size is a multiple of this.
        batched: the most tokens per step (`--max-num-batched-tokens`).
        sequences: the most sequences per step (`--max-num-seqs`).
        batches: number of concurrent steps.
    """

    block: int = 16
    kernel: int = 16
    batched: int = 2048
    sequences: int = 256
    batches: int = 2

    def in_flight(self, length: int) -> int:
        """Most tokens that are scheduled but not finished, for sequences of up to `length` tokens."""
        return self.batches * min(self.batched, self.sequences * length)


def defaults(target: Target | None, memory: float | None = None) -> Defaults:
    """vLLM's defaults on a target. `memory`: bytes of a device; None: the target's."""
    if target and target.is_cpu:
        return Defaults(block=128, kernel=32, batched=2048, sequences=128, batches=1)
    size = memory if memory is not None else (target.memory or 0) * 1e9 if target else 0
    # 80 GB as advertised are 79 to 80 GiB, and vLLM's limits are 70 and 160 GiB, so advertised sizes give the same defaults.
    if size >= 160 * GIB:
        return Defaults(batched=16384, sequences=1024)
    if size >= 70 * GIB and target and not target.title.startswith("A100"):
        return Defaults(batched=8192, sequences=1024)
    return Defaults()
