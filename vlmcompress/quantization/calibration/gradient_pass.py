"""Gradients of the answer's loss at the output of each linear layer, by a backward pass over each calibration sample.

The loss is the cross entropy of a sample's answer tokens, mean over them, teacher forced. At the output `Y [tokens, out]` of
every linear layer of the decoder the gradient `dL/dY` is reduced to two numbers per modality: MBQ's mean magnitude (arXiv
2412.19509) and the mean square, a diagonal of the empirical Fisher information (see `statistics.gradients` for their use).
Samples of similar length run together (`calibration.block_inputs`), each with its own loss, so batching does not change the
numbers. The whole model is called, so that it computes its own positions (M-RoPE's too); parameters get no gradients, and
autograd starts at the first decoder block, so the tower is not traced. Decoder blocks are checkpointed: memory holds the input
of every block and the graph of one. The output head, whose logits may take more memory than all blocks, processes the answers'
tokens in parts. Cost: two forward passes and a backward pass that computes no weight gradients, about three forward passes. A
CPU that only emulates 16-bit products multiplies in float32 (`models.devices`).

With an accelerator the model is moved there for the pass; blocks are streamed if it does not fit. Sums over tokens have a
fixed order, in float64, so that results are reproducible.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlmcompress import models
from vlmcompress.models import VLM, Group
from vlmcompress.models.data.encode import ANSWER
from vlmcompress.models.devices import accelerated, float_products, replaced_forward
from vlmcompress.numerics.statistics.balance import Sensitivity
from vlmcompress.numerics.statistics.gradients import (
    Gradient,
    Gradients,
    sensitivities,
)
from vlmcompress.numerics.statistics.inputs import MODALITIES
from vlmcompress.quantization.calibration.block_inputs import add_positions, bucket_by_length, collate
from vlmcompress.utils import distributed
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, silent
from vlmcompress.utils.work_folder import WorkFolder

NO_ANSWER = "no calibration sample has an answer, which the gradients of the loss need; add answers"
_HALF_SCALE = 1024.0  # loss scale where gradients are float16, whose smallest number is 6e-8
_NO_TARGET = -100  # target of tokens that are not part of the loss
_LOGITS = 1 << 25  # most logits in memory at a time
_KINDS = 1 + len(MODALITIES)  # kinds of tokens; the first is ignored


def gradients(
    vlm: VLM,
    samples: Sequence[dict[str, Tensor]],
    progress: Progress = silent,
    *,
    checkpointed: bool = True,
) -> Gradients:
    """Gradients of the answers' loss at the outputs of the decoder's linear layers, averaged over samples and tokens.

    Args:
        samples: from `encode`; samples without an answer are passed over.
        progress: called with (label, done, total).
        checkpointed: keep the graph of one block instead of all; does not change the result.

    Raises:
        UserError: no sample has an answer, or a gradient is not finite.
    """
    answered = [index for index, sample in enumerate(samples) if (sample["modality"][:, :-1] == ANSWER).any()]
    if not answered:
        raise UserError(NO_ANSWER)
    blocks: list[list[str]] = [[] for _ in models.decoder_layers(vlm.model, vlm.spec)]
    for group in models.resolve_groups(vlm.model, vlm.spec):
        blocks[group.layer] += group.linears
    names = [name for linears in blocks for name in linears]
    totals, scale, loss, done = _Totals(names), _HALF_SCALE if vlm.model.dtype == torch.float16 else 1.0, 0.0, 0
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(accelerated(vlm.model, models.decoder_layers(vlm.model, vlm.spec)))
        for context in (_graph(vlm, checkpointed), totals.watching(vlm.model), torch.enable_grad()):
            stack.enter_context(context)
        stack.enter_context(float_products(vlm.model))
        progress("gradients", 0, len(answered))
        for rows in distributed.shard(bucket_by_length([samples[index] for index in answered])):
            indices = [answered[row] for row in rows]
            batch = {key: value.to(device) for key, value in collate([samples[index] for index in indices]).items()}
            add_positions(batch, vlm.spec)
            totals.begin(batch["modality"])
            losses = _propagate(vlm.model, batch, scale)
            totals.end(scale, indices)
            if totals.problem:
                break
            loss += float(losses.double().sum()) / len(answered)
            done += len(rows)
            progress("gradients", done, len(answered))
        distributed.raise_any(totals.problem)
    loss = float(distributed.all_sum(torch.tensor(loss, dtype=torch.float64)))
    means = [{name: totals.mean(name, vlm.model) for name in linears} for linears in blocks]
    return Gradients(loss, len(answered), means)


def kept_gradients(
    work: WorkFolder,
    vlm: VLM,
    samples: Sequence[dict[str, Tensor]],
    progress: Progress = silent,
) -> Gradients:
    """Read the gradients from `work`, or compute them and save them there."""
    stored = work.read_note("gradients", Gradients)
    if stored is not None:
        return Gradients.from_dict(stored)
    computed = gradients(vlm, samples, progress)
    if distributed.is_main():
        work.write_note("gradients", computed.to_dict())
    return computed


def kept_sensitivities(
    work: WorkFolder,
    vlm: VLM,
    blocks: Sequence[Sequence[Group]],
    samples: Sequence[dict[str, Tensor]],
    progress: Progress = silent,
) -> dict[tuple[int, str], Sensitivity]:
    """Sensitivity of each group of `blocks`, by (block, group), for the balance `mbq`."""
    names = [{group.name: group.linears for group in groups} for groups in blocks]
    return sensitivities(kept_gradients(work, vlm, samples, progress), names)


def _propagate(model: Any, batch: dict[str, Tensor], scale: float) -> Tensor:
    """Backpropagate each sample's loss times `scale` through the model.

    Args:
        batch: as from `encode`, of one sample or several.

    Returns:
        Losses in nats, `[samples]`: the mean cross entropy of the next-token predictions at a sample's answer tokens.
    """
    inputs = {key: value for key, value in batch.items() if key != "modality"}
    answers = batch["modality"][:, :-1] == ANSWER
    columns = answers.any(0).nonzero().squeeze(1)
    targets = batch["input_ids"][:, 1:].masked_fill(~answers, _NO_TARGET)
    counts = answers.sum(1, keepdim=True)

    def logits(columns: Tensor) -> Tensor:
        logits = model(**inputs, use_cache=False, logits_to_keep=columns).logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    # Logits are computed and differentiated some columns at a time: the base model runs once and its output becomes a leaf;
    # each call with `logits_to_keep` (transformers' argument) uses that leaf instead of the base; at the end the leaf's summed
    # gradient is backpropagated through the base.
    kept: list[Any] = []  # what the model passes to its head
    hook = model.base_model.register_forward_hook(lambda _module, _args, output: kept.append(output))
    vocabulary = logits(columns[:1]).shape[-1]
    hook.remove()
    states, parts = kept[0].last_hidden_state, []
    kept[0].last_hidden_state = leaf = states.detach().requires_grad_()
    with replaced_forward(model.base_model, lambda *_args, **_kwargs: copy.copy(kept[0])):
        for chunk in columns.split(max(1, _LOGITS // (len(answers) * vocabulary))):
            predicted, target = logits(chunk), targets[:, chunk]
            each = nn.functional.cross_entropy(predicted.flatten(0, 1), target.flatten(), reduction="none")
            # A sample's loss is the mean over its answer's tokens; the sum over samples gives each its own gradient.
            losses = each.view_as(target).sum(1, keepdim=True) / counts
            parts.append(losses.detach())
            (losses.sum() * scale).backward()
    states.backward(leaf.grad)
    return torch.cat(parts, 1).sum(1)


class _Totals:
    """Sums over samples of the gradients at the outputs of linear layers, by modality.

    Attributes:
        sums: layer -> `[modalities, 4]`: sum of samples' mean magnitudes, sum of tokens' squares, number of samples, of
            tokens.
        problem: message about the first faulty sample; None: there is none.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.sums = {name: torch.zeros(len(MODALITIES), 4, dtype=torch.float64) for name in names}
        self._batch_sums: dict[str, Tensor] = {}  # current batch: layer -> [samples, kinds, 3]
        self._kinds = torch.empty(0)  # one-hot kind of each token, [samples, tokens, kinds, 1]
        self._experts: set[str] = set()  # layers that may see no token
        self._rows = 0
        self.problem: str | None = None

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Within the context, gradients at layers' outputs are reduced to sums over a sample's tokens of each modality."""
        with contextlib.ExitStack() as hooks:
            for name in self.sums:
                parent = model.get_submodule(name.rpartition(".")[0])
                expert = parent if isinstance(parent, models.Expert) else None
                self._experts |= {name} if expert else set()
                hooks.callback(model.get_submodule(name).register_forward_hook(self._watch(name, expert)).remove)
            yield

    def begin(self, modality: Tensor) -> None:
        """Start a batch with the tokens' `modality [samples, tokens]`."""
        self._rows = len(modality)
        self._kinds = (modality[..., None] == torch.arange(_KINDS, device=modality.device))[..., None]

    def end(self, scale: float, indices: Sequence[int]) -> None:
        """Add the gradients since `begin`, of a loss times `scale`. `indices`: numbers of the samples, for messages."""
        if missing := self.sums.keys() - self._batch_sums.keys() - self._experts:
            raise UserError(
                f"the answer's loss does not depend on {min(missing)}; the model's decoder does not match its family"
            )
        names = list(self._batch_sums)
        together = torch.stack([self._batch_sums[name] for name in names]).cpu()
        together = together.view(len(names), self._rows, _KINDS, 3) / torch.tensor([scale, scale**2, 1]).double()
        if not (finite := together.isfinite().all(3).all(2).all(0)).all():
            index = indices[int(finite.logical_not().nonzero()[0])]
            bad = f"calibration sample {index}: the gradients of the answer's loss hold NaN or Inf; drop the sample"
            self.problem = self.problem or bad
        for name, sums in zip(names, together[:, :, 1:], strict=True):
            tokens = sums[..., 2]
            # MBQ's g: the mean over a sample's tokens, then over samples of any length. Squares (Fisher): the mean over
            # tokens.
            magnitude = sums[..., 0] / tokens.clamp_min(1)
            self.sums[name] += torch.stack([magnitude, sums[..., 1], tokens > 0, tokens], 2).sum(0)
        self._batch_sums.clear()

    def mean(self, name: str, model: nn.Module) -> Gradient:
        """A layer's means over the samples of all workers, for modalities that occurred."""
        sums = distributed.all_sum(self.sums[name])
        rows = {m: row for m, row in zip(MODALITIES, sums.tolist(), strict=True) if row[3]}
        return Gradient(
            len(model.get_parameter(f"{name}.weight")),
            {m: row[0] / row[2] for m, row in rows.items()},
            {m: row[1] / row[3] for m, row in rows.items()},
        )

    def _watch(self, name: str, expert: models.Expert | None) -> Callable:
        def reduce(grad: Tensor, upstream: Tensor | None) -> None:
            rows = grad.detach().reshape(-1, grad.shape[-1]).float()
            # [tokens, 3]: mean |dL/dY| and (dL/dY)^2 over channels, and 1 to count tokens; sums over tokens in float64.
            values = torch.stack([rows.abs().mean(1), rows.square().mean(1), rows.new_ones(len(rows))], 1).double()
            tokens = self._kinds.shape[:2]
            if upstream is not None:  # the tokens routed to an expert, each once
                values = values.new_zeros(tokens.numel(), 3).index_copy_(0, upstream, values)
            self._batch_sums[name] = torch.where(self._kinds, values.view(*tokens, 1, 3), 0).sum(1)

        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            if output.requires_grad:
                upstream = expert.rows if expert else None
                output.register_hook(lambda grad: reduce(grad, upstream))

        return hook


@contextlib.contextmanager
def _graph(vlm: VLM, checkpointed: bool) -> Iterator[None]:
    """Within the context the graph begins at the input of the first decoder block, and each block stores only its input."""
    blocks = [vlm.model.get_submodule(name) for name in models.decoder_layers(vlm.model, vlm.spec)]

    def begin(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return (args[0].detach().requires_grad_(), *args[1:])  # a leaf: nothing before it is traced

    def twice(forward: Callable) -> Callable:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with float_products(
                vlm.model
            ):  # entered in both runs: the backward pass does not inherit the caller's context
                return forward(*args, **kwargs)

        # The block runs again in the backward pass. Dropout is off, so no random state has to be stored.
        return lambda *args, **kwargs: checkpoint(
            inside, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )

    with contextlib.ExitStack() as stack:
        stack.callback(blocks[0].register_forward_pre_hook(begin).remove)
        for block in blocks if checkpointed else ():
            stack.enter_context(replaced_forward(block, twice(block.forward)))
        yield
