"""Ask a decoder thousands of questions in seconds, exactly, by teacher forcing on packed rows.

Whether greedy decoding gives the reference answer needs no generation. It does if and only if, with the reference answer as
input, every token of it and the token that ends it is the most likely one: the first that isn't is where generation leaves.
So one forward pass over prompt and answer tells (`exact`), and much more than right or wrong besides:

    nll    -log p(answer), summed over its tokens, nats
    kl     KL(original || quantized) over the whole vocabulary at the first answer token, nats
    path   the same, averaged over all answer tokens
    logit  variance of the first token's logit errors, relative to the variance of its logits

Only the decoder is quantized, so what enters it is computed once: `encode_questions` runs the model up to its language model
and keeps input embeddings and positions (multimodal ones where the family has them). Questions about the same image begin
alike. `pack` puts that beginning once at the head of a row and the rest of each question after it, with a mask that lets
every question see the beginning and itself, and positions as if it stood alone; the numbers are those of separate sequences
but for the order of additions. Weights are those of the checkpoint (BF16 values), arithmetic is float32; activations that
an engine quantizes are rounded as it does it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models, numerics
from vlmcompress.models import VLM
from vlmcompress.models.data import Sample, encode
from vlmcompress.models.data.encode import ANSWER, VISION
from vlmcompress.numerics import ActFormat

PER_ROW = 12  # questions that share a row, at most
RECENT = 50  # images whose features are remembered


@dataclass(frozen=True)
class Question:
    """Inputs of the language model: `embeds [tokens, hidden]` float32, `positions [..., tokens]`, and the tokens to read.

    `predicts [n]` are the tokens whose outputs predict `labels [n]`: the answer and its end. `shared` tokens come up to and
    with the last image.
    """

    embeds: Tensor
    positions: Tensor
    predicts: Tensor
    labels: Tensor
    shared: int


@dataclass(frozen=True)
class Rows:
    """Questions packed into a batch: `embeds [rows, tokens, hidden]`, `positions [..., rows, tokens]`, `mask [rows, 1, tokens,
    tokens]` (true: seen), and for each of `n` predictions its `row`, `token`, `label` and `question`."""

    embeds: Tensor
    positions: Tensor
    mask: Tensor
    row: Tensor
    token: Tensor
    label: Tensor
    question: Tensor


class _Entered(Exception):
    """Raised to end a forward pass when the language model is called."""


@torch.no_grad()
def encode_questions(vlm: VLM, samples: Sequence[Sample]) -> list[Question]:
    """Run the model up to its language model on each sample and its answer."""
    vlm.model.float()  # before `encode`, which counts features by a run of its own
    return enter_language_model(vlm, encode(samples, vlm))


@torch.no_grad()
def enter_language_model(vlm: VLM, batches: Sequence[Mapping[str, Tensor]]) -> list[Question]:
    """Run the model up to its language model on encoded samples, a batch each. An attached reducer shortens prompts; it must
    not read the question, which the answer follows here."""
    captured: dict[str, Any] = {}

    def enter(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        captured.update(kwargs)
        raise _Entered

    model = vlm.model.float()
    hooks = [language_model(vlm).register_forward_pre_hook(enter, with_kwargs=True), *round_activations(model)]
    towers = [model.get_submodule(name) for name in vlm.spec.vision]
    for tower in towers:
        tower.forward = remembering(tower.forward)
    questions = []
    for batch in batches:
        modality, ids = batch["modality"][0], batch["input_ids"][0]
        with contextlib.suppress(_Entered):
            model(**{name: value for name, value in batch.items() if name != "modality"})
        answers = (modality == ANSWER).nonzero().squeeze(1)
        visual = (modality == VISION).nonzero().squeeze(1)
        embeds, positions = captured["inputs_embeds"][0].clone(), captured.get("position_ids")
        positions = torch.arange(len(ids)) if positions is None else positions[..., 0, :]
        dropped = len(ids) - len(embeds)  # all of them before the last image ends
        shared = int(visual[-1]) + 1 - dropped if len(visual) else 0
        questions.append(Question(embeds, positions, answers - dropped, ids[answers + 1], shared))
    for hook in hooks:
        hook.remove()
    for tower in towers:
        del tower.forward
    axes = max(
        (question.positions[..., 0] for question in questions), key=Tensor.dim
    ).shape  # M-RoPE has three rows of positions, prompts without images have one
    return [replace(question, positions=question.positions.expand(*axes, -1)) for question in questions]


def remembering(function: Callable, recent: int = RECENT) -> Callable:
    """Wrap a function so that it does not compute its `recent` last results twice."""
    results: dict[bytes, Any] = {}

    def remembered(*args: Any, **kwargs: Any) -> Any:
        digest = hashlib.sha256()
        for value in (*args, *kwargs.values()):
            digest.update(value.contiguous().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
        key = digest.digest()
        if key not in results:
            if len(results) >= recent:
                results.clear()
            results[key] = function(*args, **kwargs)
        return copy.copy(results[key])  # families put other things into it

    return remembered


def language_model(vlm: VLM) -> nn.Module:
    """Find the module that holds the decoder blocks."""
    return vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])


def pack(questions: Sequence[Question], tokens: int = 6000) -> list[Rows]:
    """Pack questions that begin alike into rows, in batches of about `tokens` tokens."""
    alike: dict[Any, list[int]] = {}
    for number, question in enumerate(questions):
        head = (question.embeds[: question.shared], question.positions[..., : question.shared])
        digest = hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in head)).digest()
        alike.setdefault(digest, []).append(number)
    rows = [same[at : at + PER_ROW] for same in alike.values() for at in range(0, len(same), PER_ROW)]
    rows.sort(key=lambda row: _length(questions, row))
    batches: list[list[list[int]]] = [[]]
    for row in rows:
        if batches[-1] and (1 + len(batches[-1])) * _length(questions, row) > tokens:
            batches.append([])
        batches[-1].append(row)
    return [_batch(questions, batch) for batch in batches]


def _length(questions: Sequence[Question], row: Sequence[int]) -> int:
    shared = questions[row[0]].shared
    return shared + sum(len(questions[number].embeds) - shared for number in row)


def _batch(questions: Sequence[Question], batch: Sequence[Sequence[int]]) -> Rows:
    length = max(_length(questions, row) for row in batch)
    first = questions[batch[0][0]]
    embeds = first.embeds.new_zeros(len(batch), length, first.embeds.shape[1])
    positions = first.positions.new_zeros(*first.positions.shape[:-1], len(batch), length)
    mask = torch.eye(length, dtype=torch.bool).repeat(len(batch), 1, 1)
    predictions: list[tuple[int, int, int, int]] = []
    for r, row in enumerate(batch):
        shared = at = questions[row[0]].shared
        embeds[r, :shared] = questions[row[0]].embeds[:shared]
        positions[..., r, :shared] = questions[row[0]].positions[..., :shared]
        mask[r, :shared, :shared] = True
        for number in row:
            encoded = questions[number]
            end = at + len(encoded.embeds) - shared
            embeds[r, at:end], positions[..., r, at:end] = encoded.embeds[shared:], encoded.positions[..., shared:]
            mask[r, at:end, :shared] = True
            mask[r, at:end, at:end] = True
            places = (encoded.predicts - shared + at).tolist()
            predictions += [
                (r, place, label, number) for place, label in zip(places, encoded.labels.tolist(), strict=True)
            ]
            at = end
    row_, token, label, question = torch.tensor(predictions).T
    return Rows(embeds, positions, mask.tril_()[:, None], row_, token, label, question)


@torch.no_grad()
def predictions(vlm: VLM, batches: Sequence[Rows]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `logits [n, vocabulary]` at every answer token, with `label [n]` and `question [n]`, ordered by question."""
    model, inner, hooks = vlm.model.float(), language_model(vlm), round_activations(vlm.model)
    logits, last = [], model.get_submodule(models.decoder_layers(model, vlm.spec)[-1]).mlp
    forward = last.forward
    for rows in batches:
        last.forward = only(forward, (rows.row, rows.token))
        hidden = inner(
            inputs_embeds=rows.embeds, position_ids=rows.positions, attention_mask=rows.mask, use_cache=False
        ).last_hidden_state
        logits.append(model.get_output_embeddings()(hidden[rows.row, rows.token]))
    last.forward = forward
    for hook in hooks:
        hook.remove()
    label, question = (torch.cat([getattr(rows, name) for rows in batches]) for name in ("label", "question"))
    order = question.argsort(stable=True)  # the tokens of a question are in one row, in order
    return torch.cat(logits)[order], label[order], question[order]


def only(forward: Callable[[Tensor], Tensor], read: tuple[Tensor, Tensor]) -> Callable[[Tensor], Tensor]:
    """Restrict a function to the tokens that are read, zero at others: nothing after the last block would see those."""

    def computed(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[read] = forward(x[read])
        return out

    return computed


ARGUMENTS = ("num_bits", "type", "strategy", "group_size", "dynamic")
ROUNDED = {  # these of compressed-tensors -> number format
    (8, "int", "token", None, True): ActFormat("int", 8, dynamic=True),
    (8, "float", "token", None, True): ActFormat("float", 8, dynamic=True),
    (4, "float", "tensor_group", 16, "local"): ActFormat("float", 4, dynamic=True),
    (4, "float", "group", 32, True): ActFormat("float", 4, dynamic=True, mx=True),
    (8, "float", "group", 32, True): ActFormat("float", 8, dynamic=True, mx=True),
}


def round_activations(model: nn.Module) -> list[Any]:
    """Add hooks that round the inputs of layers with quantized activations as an engine does. Layers that read the same input
    share a scale, so it is rounded once for all."""
    last: tuple[Tensor, Tensor] | None = None  # an input and what it was rounded to

    def rounded(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal last
        if last is None or last[0] is not args[0]:
            last = args[0], round_input(module, args[0])
        return (last[1], *args[1:])

    layers = [module for module in model.modules() if input_format(module)]
    return [layer.register_forward_pre_hook(rounded) for layer in layers]


def input_format(module: nn.Module) -> ActFormat | None:
    """The number format of a layer's inputs; None where they stay in 16 bits. ValueError for one that is not simulated."""
    arguments = getattr(getattr(module, "quantization_scheme", None), "input_activations", None)
    if arguments is None:
        return None
    act = ROUNDED.get(tuple(getattr(arguments, name) for name in ARGUMENTS))
    if act is None or not arguments.symmetric:
        raise ValueError(f"no simulation of activations as {arguments}")
    return act


def round_input(module: nn.Module, x: Tensor) -> Tensor:
    """Round inputs `x [..., in]` of a layer as an engine does; unchanged where they stay in 16 bits. Gradients pass."""
    act = input_format(module)
    if act is None:
        return x
    scale = getattr(module, "input_global_scale", None) if act.nvfp4 else None
    rounded = numerics.round_activations(x.detach().flatten(0, -2), act, scale).view_as(x)
    return x + (rounded - x).detach() if x.requires_grad else rounded  # straight-through


def measure(original: Tensor, quantized: Tensor, label: Tensor, question: Tensor) -> dict[str, Tensor]:
    """Compute every measure `[questions]`, in float64, from two models' logits `[n, vocabulary]`."""
    p, q = original.double().log_softmax(-1), quantized.double().log_softmax(-1)
    counts = question.bincount()
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])

    def total(values: Tensor) -> Tensor:
        return torch.zeros(len(counts), dtype=torch.float64).index_add_(0, question, values.double())

    kl = (p.exp() * (p - q)).sum(-1)
    error, base = (quantized - original)[first].double(), original[first].double()
    return {
        "exact": (total(quantized.argmax(-1) == label) == counts).double(),
        "nll": total(-q.gather(1, label[:, None]).squeeze(1)),
        "kl": kl[first],
        "path": total(kl) / counts,
        "logit": error.var(-1, correction=0) / base.var(-1, correction=0),
    }


def load_quantized(folder: Path, like: VLM) -> VLM:
    """Load a compressed-tensors checkpoint with its weights dequantized to BF16, ready for `predictions`."""
    from compressed_tensors.quantization import disable_quantization
    from transformers.utils.quantization_config import CompressedTensorsConfig

    with models.quiet_transformers():
        config = CompressedTensorsConfig(dequantize=True)
        model, info = models.open_model(folder, dtype=torch.bfloat16, quantization_config=config)
    if lacking := sorted(map(str, info["missing_keys"])):
        raise ValueError(f"{folder} lacks {lacking[0]} and {len(lacking) - 1} more")
    model.apply(disable_quantization)  # rounding inputs twice and weights again costs time and stops gradients
    return VLM(model.eval().requires_grad_(False), like.processor, like.spec, folder)


def cached(path: Path, make: Any) -> Any:
    """Return the result of `make()`, which is kept in a file of tensors."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        torch.save(make(), aside)
        aside.rename(path)
    return torch.load(path, weights_only=False)
