"""EAGLE-3 (arXiv 2503.01840): one decoder block that guesses a model's next tokens from its hidden states.

The target's hidden states before some of its blocks (the *taps*) are joined and projected, `g_t = W [h_t^a; h_t^b; h_t^c]`.
With the embedding of the next token the draft computes, at position t,

    r_t = g_t;   x_t = [norm(e_{t+1}); norm(r_t)];   a_t = r_t + Attn(x)_t;   f_t = a_t + MLP(norm(a_t))

and `softmax(W_out norm(f_t))`, over the draft's own vocabulary, predicts the target's token after position t + 1. For tokens
further ahead there are no taps: at position t + 1 the draft's own `f_t` replaces `g_{t+1}`. Training does the same as drafting
(the paper's training-time test): `STEPS` passes, in each of which inputs come from the pass before, one position earlier.
Attention then sees the keys of the taps up to the position where guessing began, and the draft's own keys from there on.

The layout is that of vLLM 0.32's `Eagle3LlamaForCausalLM`; the embedding is the target's. Cost of a guess: one block with a
concatenated input, and the output head of the draft's vocabulary. Loses: guesses are poor for text unlike the target's answers
to the training prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from vlmcompress.export import draft_folder
from vlmcompress.export.draft_folder import LAYER

STEPS = 3
"""Number of consecutive tokens that are guessed, in training and in serving."""
LATER = 0.8
"""Ratio of the loss weights of consecutive steps, as in the paper's code."""


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft head.

    Attributes:
        hidden: width of the hidden states, the target's.
        intermediate: width of the MLP.
        heads, kv_heads, head_dim: of attention.
        taps: indices of the target's blocks whose input hidden states are used; the number of blocks means after the last one.
        vocabulary: number of tokens that the draft can predict.
        eps: epsilon of the norms.
        theta: base of the rotary positions.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    vocabulary: int
    eps: float
    theta: float

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of all that is trained, by the names on disk."""
        return draft_folder.tensor_shapes(
            hidden=self.hidden,
            joined=len(self.taps) * self.hidden,
            intermediate=self.intermediate,
            queries=self.heads * self.head_dim,
            keys=self.kv_heads * self.head_dim,
            vocabulary=self.vocabulary,
        )


def default_taps(blocks: int) -> tuple[int, ...]:
    """The taps for a target with `blocks` blocks: vLLM's defaults; for shallow models an early and a middle one and the
    end."""
    # vLLM 0.32 `model_executor/models/interfaces.py::get_eagle3_default_aux_hidden_state_layers`.
    deep = (2, blocks // 2, blocks - 3)
    return deep if blocks >= 9 else tuple(sorted({max(1, blocks // 4), max(1, blocks // 2), blocks}))


def create(shape: DraftShape, seed: int, norm: Tensor, head: Tensor) -> dict[str, Tensor]:
    """Initial values of a draft, float32: it passes the last tap through and decodes it as the target would.

    Args:
        norm: weight `[hidden]` of the target's last norm.
        head: rows `[vocabulary, hidden]` of the target's output head.
    """
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in shape.tensors().items():
        if len(size) == 1:
            tensors[name] = torch.ones(size)
        else:
            tensors[name] = torch.randn(size, generator=random) * size[1] ** -0.5
    for name in (f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.down_proj.weight"):
        tensors[name] *= 0.1  # the block begins near the identity
    tensors["fc.weight"] *= 0.1
    tensors["fc.weight"][:, -shape.hidden :] += torch.eye(shape.hidden)
    tensors["norm.weight"], tensors["lm_head.weight"] = norm.float().clone(), head.float().clone()
    return tensors


@dataclass(frozen=True)
class DraftSample:
    """The training data of one sample, whose context has R rows: one for each of the sample's tokens but the last, or fewer.

    Attributes:
        embeds: `[R, hidden]` embedding of the next token.
        taps: `[R, taps * hidden]` the target's hidden states.
        positions: `[R]` rotary positions; for M-RoPE the first axis, as in vLLM.
        begin: the first row whose guess counts; all later rows count, and rows before it belong to the prompt.
        logits: `[n, vocabulary]` the target's logits at the positions that rows from `begin` on predict, over the draft's
            tokens.
        spoken: `[n]` index of the target's token there among the draft's tokens; -1: not among them.
    """

    embeds: Tensor
    taps: Tensor
    positions: Tensor
    begin: int
    logits: Tensor
    spoken: Tensor


def guesses(tensors: Mapping[str, Tensor], shape: DraftShape, sample: DraftSample, steps: int = STEPS) -> list[Tensor]:
    """The draft's logits at the answer positions, after guessing 1, 2, ..., `steps` tokens in a row.

    Returns:
        For each step s the logits `[n, vocabulary]` for the token at each answer position, predicted from the target's hidden
        states s + 1 positions before.
    """
    # The paper's training-time test: pass s reads the output of pass s - 1, shifted by one row, as drafting does.
    begin, count = sample.begin, len(sample.logits)
    start = max(0, begin - steps + 1)  # first row whose hidden states later passes need
    hidden = linear(sample.taps, tensors["fc.weight"])  # g_t of the docstring
    past: list[tuple[Tensor, Tensor]] = []
    logits = []
    for step in range(steps):
        rows = slice(0, None) if step == 0 else slice(start, None)
        normed, output = _pass(tensors, shape, sample.embeds[rows], hidden, sample.positions[rows], past, start)
        logits.append(linear(normed[begin - start : begin - start + count], tensors["lm_head.weight"]))
        hidden = torch.cat([output[:1], output[:-1]])  # the first row has no predecessor and is not used
    return logits


def _pass(
    tensors: Mapping[str, Tensor],
    shape: DraftShape,
    embeds: Tensor,
    hidden: Tensor,
    positions: Tensor,
    past: list[tuple[Tensor, Tensor]],
    start: int,
) -> tuple[Tensor, Tensor]:
    """One pass of the block; adds its keys and values to `past`.

    Args:
        embeds, hidden, positions: all rows in the first pass, rows from `start` on in later ones.
        past: keys and values `[kv_heads, positions, head_dim]` of the passes before.

    Returns:
        For positions from `start` on: the input of the output head, and the hidden states for the next pass.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (shape.hidden,), tensors[f"{name}.weight"], shape.eps)

    # x_t: two norms of its own, as in vLLM's `models/llama_eagle3.py::LlamaDecoderLayer.forward`.
    inputs = torch.cat([norm(embeds, f"{LAYER}.input_layernorm"), norm(hidden, f"{LAYER}.hidden_norm")], -1)
    offset = 0 if past else start  # rows before `start` provide keys and values only
    attention = f"{LAYER}.self_attn"
    keys = _rotated(
        _heads(linear(inputs, tensors[f"{attention}.k_proj.weight"]), shape.kv_heads), positions, shape.theta
    )
    values = _heads(linear(inputs, tensors[f"{attention}.v_proj.weight"]), shape.kv_heads)
    queries = _heads(linear(inputs[offset:], tensors[f"{attention}.q_proj.weight"]), shape.heads)
    queries = _rotated(queries, positions[offset:], shape.theta)
    past.append((keys, values))
    mixed = _attend(queries, past, start, shape.heads // shape.kv_heads)
    # a_t: the residual is the hidden state before its norm (`norm_before_residual: false` in the config)
    residual = hidden[offset:] + linear(mixed, tensors[f"{attention}.o_proj.weight"])
    x = norm(residual, f"{LAYER}.post_attention_layernorm")
    gate, up, down = (tensors[f"{LAYER}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    output = residual + linear(silu(linear(x, gate)) * linear(x, up), down)  # f_t
    return norm(output, "norm"), output


def _attend(queries: Tensor, past: Sequence[tuple[Tensor, Tensor]], start: int, repeats: int) -> Tensor:
    """Attention of pass s over the first pass's keys up to s positions before, and over one of each later pass.

    Args:
        queries: `[heads, n, head_dim]` of the positions from `start` on.
        past: keys and values of each pass so far, of the first for all positions, of later ones from `start` on.

    Returns:
        `[n, heads * head_dim]`.
    """
    (first_keys, first_values), *later = (
        (k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)) for k, v in past
    )
    steps, count = len(later), queries.shape[1]
    scale = queries.shape[-1] ** -0.5
    scores = queries @ first_keys.mT * scale
    # In pass s the keys of the last s positions come from the later passes, not from the target's hidden states.
    visible = (
        torch.arange(first_keys.shape[1], device=queries.device)
        <= (torch.arange(start - steps, start - steps + count, device=queries.device)[:, None])
    )
    parts = [scores.masked_fill(~visible, -torch.inf)]
    # A row sees exactly one key of each later pass (its own chain of guesses): a diagonal, so no second matrix is needed.
    shifted = [(keys.roll(steps - s, 1), values.roll(steps - s, 1)) for s, (keys, values) in enumerate(later, 1)]
    parts += [((queries * keys).sum(-1, keepdim=True) * scale) for keys, _ in shifted]
    weights = torch.cat(parts, -1).softmax(-1)
    mixed = weights[..., : first_keys.shape[1]] @ first_values
    for s, (_, values) in enumerate(shifted):
        mixed = mixed + weights[..., first_keys.shape[1] + s, None] * values
    return mixed.transpose(0, 1).flatten(1)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of `x [heads, n, head_dim]`, halves rotated as Llama does."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def loss(logits: Sequence[Tensor], sample: DraftSample) -> Tensor:
    """KL divergence in nats of the draft's distributions from the target's, a scalar averaged over positions and weighted
    steps.

    Both distributions are over the draft's tokens.
    """
    target = sample.logits.log_softmax(-1)
    each = [(target.exp() * (target - guess.log_softmax(-1))).sum(-1).mean() for guess in logits]
    weights = [LATER**step for step in range(len(each))]
    return sum(w * value for w, value in zip(weights, each, strict=True)) / sum(weights)  # type: ignore[return-value]


def accepted(logits: Sequence[Tensor], sample: DraftSample) -> Tensor:
    """Number of guesses that greedy decoding accepts, by step, float64 `[1 + steps]`; the first entry is the number of chains.

    A guess is accepted if it and all earlier guesses of its chain equal the target's tokens. A chain starts at each answer
    position where all steps have a target.
    """
    count, steps = len(sample.spoken), len(logits)
    rows = max(0, count - steps + 1)
    sums = torch.zeros(1 + steps, dtype=torch.float64)
    sums[0] = rows
    good = torch.ones(rows, dtype=torch.bool, device=sample.spoken.device)
    for step, guess in enumerate(logits):
        # A chain ends at its first wrong guess: a cumulative product over the steps.
        good = good & (guess.argmax(-1) == sample.spoken)[step : step + rows]
        sums[1 + step] = good.sum()
    return sums
