"""EAGLE-3's training-time test, against drafting token by token with a cache as an engine does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vlmcompress.training import eagle3
from vlmcompress.training.eagle3 import DraftSample, DraftShape

SHAPE = DraftShape(16, 24, heads=4, kv_heads=2, head_dim=6, taps=(1, 2, 4), vocabulary=11, eps=1e-6, theta=1e4)
ROWS, BEGIN, ANSWERS = 13, 7, 5


@pytest.fixture
def draft() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=random) * 0.4 for name, size in SHAPE.tensors().items()}


@pytest.fixture
def sample() -> DraftSample:
    random = torch.Generator().manual_seed(1)
    return DraftSample(
        embeds=torch.randn(ROWS, 16, generator=random),
        taps=torch.randn(ROWS, 48, generator=random),
        positions=torch.tensor([0, 1, 2, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9]),  # an image's tokens share theirs
        begin=BEGIN,
        logits=torch.randn(ANSWERS, 11, generator=random),
        spoken=torch.randint(0, 11, (ANSWERS,), generator=random),
    )


def norm(x, weight):
    return x / (x.square().mean() + SHAPE.eps).sqrt() * weight


def rotated(x, position):
    """`x [heads, head_dim]`: pairs of numbers as complex ones, turned."""
    half = x.shape[-1] // 2
    turns = torch.tensor([float(position) / 1e4 ** (k / half) for k in range(half)])
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), turns)
    return torch.cat([turned.real, turned.imag], -1)


def guess(draft, embed, hidden, position, cache):
    """One token through the block; its keys and values are added to the cache. Returns logits and hidden state."""
    layer = {name.removeprefix("layers.0."): value for name, value in draft.items()}
    x = torch.cat([norm(embed, layer["input_layernorm.weight"]), norm(hidden, layer["hidden_norm.weight"])])
    query, key, value = ((layer[f"self_attn.{name}_proj.weight"] @ x).view(-1, 6) for name in "qkv")
    cache.append((rotated(key, position), value))
    mixed = []
    for head, row in enumerate(rotated(query, position)):
        scores = torch.stack([row @ keys[head // 2] for keys, _ in cache]) / 6**0.5
        mixed.append(sum(w * values[head // 2] for w, (_, values) in zip(scores.softmax(0), cache, strict=True)))
    residual = hidden + layer["self_attn.o_proj.weight"] @ torch.cat(mixed)
    x = norm(residual, layer["post_attention_layernorm.weight"])
    gate, up = layer["mlp.gate_proj.weight"] @ x, layer["mlp.up_proj.weight"] @ x
    output = residual + layer["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
    return draft["lm_head.weight"] @ norm(output, draft["norm.weight"]), output


def drafted(draft, sample, start):
    """Logits of `STEPS` guesses in a row, the first from the target's hidden state at `start`."""
    cache, rows = [], []
    taps = sample.taps @ draft["fc.weight"].T
    for t in range(start + 1):
        logits, hidden = guess(draft, sample.embeds[t], taps[t], sample.positions[t], cache)
    rows.append(logits)
    for t in range(start + 1, start + eagle3.STEPS):
        logits, hidden = guess(draft, sample.embeds[t], hidden, sample.positions[t], cache)
        rows.append(logits)
    return rows


def test_drafted_tokens_are_those_of_an_engine(draft, sample):
    """Teacher forced: the tokens between are the answer's, as they are where guesses are accepted."""
    logits = eagle3.guesses(draft, SHAPE, sample)
    assert len(logits) == eagle3.STEPS
    for row in range(ANSWERS - eagle3.STEPS + 1):
        for step, expected in enumerate(drafted(draft, sample, BEGIN + row)):
            torch.testing.assert_close(logits[step][row + step], expected, rtol=1e-4, atol=1e-5)


def test_accepted_rows(draft, sample):
    logits = eagle3.guesses(draft, SHAPE, sample)
    sample = dataclasses.replace(sample, spoken=logits[0].argmax(-1))  # a first guess is always right
    expected = [0] * eagle3.STEPS
    for row in range(ANSWERS - eagle3.STEPS + 1):
        for step, guessed in enumerate(drafted(draft, sample, BEGIN + row)):
            if int(guessed.argmax()) != int(sample.spoken[row + step]):
                break
            expected[step] += 1
    rows, *right = eagle3.accepted(logits, sample).tolist()
    assert (rows, right) == (ANSWERS - eagle3.STEPS + 1, expected) and right[0] == rows > right[-1]


def test_loss_is_the_weighted_divergence(draft, sample):
    logits = eagle3.guesses(draft, SHAPE, sample)
    target = torch.distributions.Categorical(logits=sample.logits)
    parts = [
        torch.distributions.kl_divergence(target, torch.distributions.Categorical(logits=x)).mean() for x in logits
    ]
    expected = (parts[0] + 0.8 * parts[1] + 0.64 * parts[2]) / 2.44
    torch.testing.assert_close(eagle3.loss(logits, sample), expected)


@pytest.mark.parametrize(
    ("blocks", "taps"), [(36, (2, 18, 33)), (9, (2, 4, 6)), (4, (1, 2, 4)), (2, (1, 2)), (1, (1,))]
)
def test_taps_are_within_the_target(blocks, taps):
    assert eagle3.default_taps(blocks) == taps
