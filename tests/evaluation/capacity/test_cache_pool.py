"""The cache in blocks: the worked example, a pool that is filled block by block, and devices that share heads.

That vLLM counts so is what `test_against_vllm.py` asks it.
"""

from __future__ import annotations

import math

import pytest

from vlmcompress.engines.vllm.served_model import Attention, CacheLayer, ServedDecoder, State, tp_choices, tp_problem
from vlmcompress.evaluation.capacity.cache_pool import Group, Pool, pool, tokens_bytes


def decoder(*blocks: Attention | State | None) -> ServedDecoder:
    return ServedDecoder(blocks, 8192, None, 2, 0, 0, (28672,))


def test_blocks_of_the_worked_example():
    """80 layers of 8 heads of 128 in 16 bits (issue 15). The figure of 5.2 GB for 256 tokens that is copied about is wrong."""
    layers = decoder(*[Attention(64, 8, 128)] * 80).layers(1)
    assert layers[0].token_bytes == 4096
    assert tokens_bytes(layers, 576) == 188_743_680
    assert tokens_bytes(layers, 500) == 163_840_000
    assert tokens_bytes(layers, 256) == 83_886_080
    assert round(50e9 / tokens_bytes(layers, 500)) == 305
    assert round(50e9 / tokens_bytes(layers, 1076)) == 142
    whole = pool(layers, 16, 16)
    assert math.floor(whole.requests(50_000_000_000, 500, 8192)) == 298  # 32 whole blocks of 16 for 500 tokens
    assert math.floor(whole.requests(50_000_000_000, 1076, 8192)) == 140


@pytest.mark.parametrize("tokens", [1, 16, 17, 100, 1000])
@pytest.mark.parametrize("window", [1, 5, 32, 64])
def test_a_window_never_holds_more_blocks_than_are_counted(tokens, window):
    """Oracle: step through a request; a block is held while it has a token in flight or within the window of the next."""
    block, step = 16, 24
    counted = Pool((Group(1, block, window),), 1).blocks(tokens, step)
    most = 0
    for start in range(0, tokens, step):
        end = min(start + step, tokens)
        first = max(0, start - (window - 1))
        most = max(most, math.ceil(end / block) - first // block)
    assert most <= counted <= most + 2


def test_groups_of_windows_and_full_attention_are_equally_long():
    """Gemma 3 27B: 62 blocks, 10 of them see everything: 7 tables of 8 or 10 layers, as vLLM's docstrings have it."""
    full, local = CacheLayer(8192, None, 0, 16), CacheLayer(8192, 1024, 0, 16)
    cut = pool([full if (i + 1) % 6 == 0 else local for i in range(62)], 16, 16)
    assert [group.window for group in cut.groups].count(None) == 1
    assert len(cut.groups) == 1 + math.ceil(52 / 10) and cut.block_bytes == 10 * 16 * 8192
    assert sum(group.layers for group in cut.groups) >= 62
    lengthy = cut.blocks(100_000, 2048)
    assert lengthy == 6250 + 6 * (math.ceil((1023 + 2048) / 16) + 1)


def test_a_state_takes_a_page_as_large_as_attention_has():
    """Gated DeltaNet: one or two states a sequence, whatever its length; blocks grow until a page holds a state."""
    layers = [
        CacheLayer(0, None, 1_000_000),
        CacheLayer(0, None, 1_000_000),
        CacheLayer(0, None, 1_000_000),
        CacheLayer(4096, None, 0, 4),
    ]
    cut = pool(layers, 16, 16)
    (tokens,) = [group.block for group in cut.groups if group.block]
    assert tokens % 16 == 0 and tokens * 4096 >= 1_000_000 > (tokens - 16) * 4096
    assert cut.block_bytes == tokens * 4096 and len(cut.groups) == 4
    assert cut.blocks(10 * tokens, 100) == 10 + 3 * 2
    assert tokens_bytes(layers, 10) == 3_000_000 + 40_960


def test_heads_of_keys_are_divided_and_then_copied():
    described = decoder(Attention(32, 8, 128))
    assert [described.layers(tp)[0].token_bytes for tp in (1, 2, 8, 16)] == [4096, 2048, 512, 512]
    assert described.layers(2, width=1)[0].token_bytes == 1024 and described.layers(2, 1, 4)[0].token_bytes == 2 * 4 * (
        128 + 4
    )
    assert tp_choices(described) == [1, 2, 4, 8, 16]
    assert "32 attention heads" in str(tp_problem(described, 3)) and "heads of keys" in str(
        tp_problem(decoder(Attention(24, 8, 64)), 6)
    )
    assert tp_problem(decoder(Attention(32, 8, 64), State(((12, 4),), 6)), 4) == "6 heads of a recurrent block"


def test_no_cache_no_requests():
    assert pool([], 16, 16).requests(10**9, 100, 100) == 0


def test_a_state_is_kept_for_each_drafted_token():
    """Of a Gated DeltaNet a state more, each with an input of the convolution more for each drafted token."""
    described = decoder(State(((300, 2), (1000, 4)), 2, 100), Attention(4, 2, 32))
    plain, drafting = described.layers(1), described.layers(1, drafts=3)
    assert plain[0].state_bytes == 300 * 2 + 1000 * 4 and drafting[0].state_bytes == plain[0].state_bytes + 3 * 100 * 2
    assert plain[1] == drafting[1]
    blocks = pool(drafting, 16, 16).blocks(16, 16)
    assert pool(drafting, 16, 16, drafts=3).blocks(16, 16) == blocks + 3
