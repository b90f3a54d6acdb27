"""EAGLE-3 (arXiv 2503.01840): one decoder block that guesses a model's next tokens from its hidden states.

The target's hidden states before some of its blocks (the *taps*) are joined and projected, `g_t = W [h_t^a; h_t^b; h_t^c]`.
With the embedding of the next token the draft computes, at position t,

    r_t = g_t;   x_t = [norm(e_{t+1}); norm(r_t)];   a_t = r_t + Attn(x)_t;   f_t = a_t + MLP(norm(a_t))

and `softmax(W_out norm(f_t))`, over a vocabulary of its own, guesses what the target says at position t + 1. To guess further
ahead there are no taps: at position t + 1 the draft's own `f_t` takes the place of `g_{t+1}`. Training does as drafting does
(the paper's training-time test): `STEPS` passes, in each of which inputs come from the pass before, one position earlier.
Attention then sees the taps' keys up to where the guessing began, and the draft's own ones from there on.

The layout is that of vLLM 0.32's `Eagle3LlamaForCausalLM`; the embedding is the target's. Cost of a guess: one block, two of
whose inputs are joined, and the output head of the draft's vocabulary. Loses: what the target's answers to the training prompts
do not contain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from vlmcompress.export import draft_tensors
from vlmcompress.export.draft_tensors import LAYER, VECTOR

STEPS = 3
"""Tokens that are guessed in a row, in training as in serving."""
LATER = 0.8
"""Weight of a step's loss, in that of the step before (the paper's code weighs so)."""


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft head.

    Attributes:
        hidden: width of the hidden states, the target's.
        intermediate: width of the MLP.
        heads, kv_heads, head_dim: of attention.
        taps: numbers of the target's blocks before which its hidden states are taken; the number of all: after the last one.
        vocabulary: tokens that the draft can guess.
        eps: of its norms.
        theta: base of its rotary positions.
        vector: whether it adds a vector of the image to each row (`VECTOR`).
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
    vector: bool = False

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of all that is trained, by the names on disk."""
        return draft_tensors.eagle3(
            hidden=self.hidden,
            joined=len(self.taps) * self.hidden,
            intermediate=self.intermediate,
            queries=self.heads * self.head_dim,
            keys=self.kv_heads * self.head_dim,
            vocabulary=self.vocabulary,
            vector=self.vector,
        )


def default_taps(blocks: int) -> tuple[int, ...]:
    """The taps of a target of so many blocks: vLLM's defaults, and for shallow models early, middle and after the last."""
    # vLLM 0.32 `model_executor/models/interfaces.py::get_eagle3_default_aux_hidden_state_layers`.
    deep = (2, blocks // 2, blocks - 3)
    return deep if blocks >= 9 else tuple(sorted({max(1, blocks // 4), max(1, blocks // 2), blocks}))


def create(shape: DraftShape, seed: int, norm: Tensor, head: Tensor) -> dict[str, Tensor]:
    """First values of a draft, float32: it passes the last tap on, and reads it as the target would.

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
    if shape.vector:
        tensors[VECTOR].zero_()  # it begins as a draft without
    tensors["fc.weight"] *= 0.1
    tensors["fc.weight"][:, -shape.hidden :] += torch.eye(shape.hidden)
    tensors["norm.weight"], tensors["lm_head.weight"] = norm.float().clone(), head.float().clone()
    return tensors


@dataclass(frozen=True)
class Lesson:
    """What a draft learns from of one sample, whose context has R rows: those of the sample's tokens but the last, or fewer.

    Attributes:
        embeds: `[R, hidden]` what a row has for the next token: its embedding, or what stands for it (`draft_images`).
        taps: `[R, taps * hidden]` the target's hidden states.
        positions: `[R]` rotary positions; of M-RoPE the first axis, as vLLM gives a draft.
        begin: the row whose guess is the first that counts; the last ones follow it, and rows before it are of text.
        logits: `[n, vocabulary]` what the target says where the rows from `begin` on guess, over the draft's tokens.
        spoken: `[n]` the index of the token that the target says there, among the draft's tokens; -1: not among them.
        last: `[STEPS + n, hidden]` what the target's output head reads at these n positions and at those before.
        image: `[hidden]` the mean of the images' features, for a draft that has a vector of it; None: it has none.
    """

    embeds: Tensor
    taps: Tensor
    positions: Tensor
    begin: int
    logits: Tensor
    spoken: Tensor
    last: Tensor
    image: Tensor | None = None


def guesses(tensors: Mapping[str, Tensor], shape: DraftShape, lesson: Lesson, steps: int = STEPS) -> list[Tensor]:
    """The draft's logits at the answer positions, after guessing 1, 2, ..., `steps` tokens in a row.

    Returns:
        For each step s the logits `[n, vocabulary]` of what stands at each answer position, guessed from the target's hidden
        states s + 1 positions before.
    """
    # The paper's training-time test: pass s reads what pass s - 1 gave, one row later, as drafting does without a target.
    begin, count = lesson.begin, len(lesson.logits)
    start = max(0, begin - steps + 1)  # hidden states of the passes before are needed from here on
    hidden, embeds = linear(lesson.taps, tensors["fc.weight"]), lesson.embeds  # g_t of the docstring, and e_{t+1}
    if lesson.image is not None:
        embeds = embeds + linear(lesson.image, tensors[VECTOR])
    past: list[tuple[Tensor, Tensor]] = []
    logits = []
    for step in range(steps):
        rows = slice(0, None) if step == 0 else slice(start, None)
        normed, output = _pass(tensors, shape, embeds[rows], hidden, lesson.positions[rows], past, start)
        logits.append(linear(normed[begin - start : begin - start + count], tensors["lm_head.weight"]))
        hidden = torch.cat([output[:1], output[:-1]])  # the first row has nothing before it, and nothing reads it
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
        embeds, hidden, positions: of all rows in the first pass, of those from `start` on in later ones.
        past: keys and values `[kv_heads, positions, head_dim]` of the passes before.

    Returns:
        For positions from `start` on: what the output head reads, and what the next pass does.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (shape.hidden,), tensors[f"{name}.weight"], shape.eps)

    # x_t: two norms of its own, as in vLLM's `models/llama_eagle3.py::LlamaDecoderLayer.forward`.
    inputs = torch.cat([norm(embeds, f"{LAYER}.input_layernorm"), norm(hidden, f"{LAYER}.hidden_norm")], -1)
    offset = 0 if past else start  # rows before `start` have keys alone
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
        past: of each pass so far, the first over all positions, later ones from `start` on.

    Returns:
        `[n, heads * head_dim]`.
    """
    (first_keys, first_values), *later = (
        (k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)) for k, v in past
    )
    steps, count = len(later), queries.shape[1]
    scale = queries.shape[-1] ** -0.5
    scores = queries @ first_keys.mT * scale
    # A row of pass s stands s rows before what it guesses from: of the target's keys it sees none from there on.
    visible = (
        torch.arange(first_keys.shape[1], device=queries.device)
        <= (torch.arange(start - steps, start - steps + count, device=queries.device)[:, None])
    )
    parts = [scores.masked_fill(~visible, -torch.inf)]
    # Of each later pass a row sees one key, of the same row of guesses: a diagonal, so that no second matrix is needed.
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


def loss(logits: Sequence[Tensor], lesson: Lesson) -> Tensor:
    """Divergence in nats of the draft's guesses from what the target says, a mean over positions and weighted steps.

    Both distributions are over the draft's tokens.
    """
    target = lesson.logits.log_softmax(-1)
    each = [(target.exp() * (target - guess.log_softmax(-1))).sum(-1).mean() for guess in logits]
    weights = [LATER**step for step in range(len(each))]
    return sum(w * value for w, value in zip(weights, each, strict=True)) / sum(weights)  # type: ignore[return-value]


def accepted(logits: Sequence[Tensor], lesson: Lesson) -> Tensor:
    """For each step the number of guesses that greedy decoding accepts, float64 `[1 + steps]`; the first entry is of all.

    A guess counts that is what the target says, as are those before it in the same row of guesses. Rows begin at each answer
    position where all steps have a target.
    """
    count, steps = len(lesson.spoken), len(logits)
    rows = max(0, count - steps + 1)
    sums = torch.zeros(1 + steps, dtype=torch.float64)
    sums[0] = rows
    good = torch.ones(rows, dtype=torch.bool, device=lesson.spoken.device)
    for step, guess in enumerate(logits):
        # Greedy acceptance ends a row at its first wrong guess: a cumulative product over the steps.
        good = good & (guess.argmax(-1) == lesson.spoken)[step : step + rows]
        sums[1 + step] = good.sum()
    return sums
