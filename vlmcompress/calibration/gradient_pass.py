"""How much the answer's loss depends on what each linear layer puts out: one backward pass per calibration sample.

The loss is the cross entropy of a sample's answer tokens, mean over them, teacher forced. At the output `Y [tokens, out]` of
every linear layer of the decoder the gradient `dL/dY` is reduced to two numbers per modality: MBQ's mean magnitude (arXiv
2412.19509) and the mean square, a diagonal of the empirical Fisher information (`statistics.gradients` says what they are
for). The model is called as a whole, so that it computes its own positions (M-RoPE's too); no parameter gets a gradient, and
the vision tower no graph. Decoder blocks are checkpointed: what a backward pass keeps is a block's input for each of them and
the graph of one. Cost: two forward passes and a backward pass that computes no weight gradients, about three forward passes.

On a machine with an accelerator the model is moved there, and back; one that does not fit is streamed through it module by
module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlmcompress import models
from vlmcompress.common.block_files import BlockFiles
from vlmcompress.common.progress import Progress, silent
from vlmcompress.data.encode import ANSWER
from vlmcompress.errors import UserError
from vlmcompress.models import VLM, Group
from vlmcompress.statistics.balance import Sensitivity
from vlmcompress.statistics.gradients import Gradient, Gradients, sensitivities
from vlmcompress.statistics.inputs import MODALITIES

NO_ANSWER = "no calibration sample has an answer, and gradients are those of the answer's loss; add answers"
_HALF_SCALE = 1024.0  # of the loss where gradients are float16, whose smallest number is 6e-8
_ROOM = 0.8  # share of an accelerator's free memory that weights may take


def gradients(
    vlm: VLM,
    batches: Sequence[dict[str, Tensor]],
    progress: Progress = silent,
    *,
    checkpointed: bool = True,
) -> Gradients:
    """Gradients of the answers' loss at the outputs of the decoder's linear layers, averaged over samples and tokens.

    Args:
        batches: from `encode`, one sample each; samples without an answer are passed over.
        progress: called with (label, done, total).
        checkpointed: keep the graph of one block instead of all; the same result.

    Raises:
        UserError: no sample has an answer, or a gradient is not finite.
    """
    answered = [batch for batch in batches if (batch["modality"][:, :-1] == ANSWER).any()]
    if not answered:
        raise UserError(NO_ANSWER)
    blocks: list[list[str]] = [[] for _ in models.decoder_layers(vlm.model, vlm.spec)]
    for group in models.resolve(vlm.model, vlm.spec):
        blocks[group.layer] += group.linears
    names = [name for linears in blocks for name in linears]
    scale = _HALF_SCALE if vlm.model.dtype == torch.float16 else 1.0
    totals = {name: _Total() for name in names}
    loss = 0.0
    with accelerated(vlm.model) as device, _graph(vlm, checkpointed), torch.enable_grad():
        seen: dict[str, Tensor] = {}
        mask = torch.empty(0)
        with contextlib.ExitStack() as hooks:
            for name in names:
                watch = _watch(name, seen, lambda: mask)
                hooks.callback(vlm.model.get_submodule(name).register_forward_hook(watch).remove)
            for index, batch in enumerate(answered):
                batch = {key: value.to(device) for key, value in batch.items()}
                mask = batch["modality"].flatten().long()
                sample = answer_loss(vlm.model, batch)
                (sample * scale).backward()
                _add(totals, seen, mask, scale, index)
                loss += float(sample.detach()) / len(answered)
                progress("measuring sensitivity", index + 1, len(answered))
    channels = {name: len(vlm.model.get_parameter(f"{name}.weight")) for name in names}
    found = [{name: totals[name].mean(channels[name]) for name in linears} for linears in blocks]
    return Gradients(loss, len(answered), found)


def kept_gradients(
    store: BlockFiles, vlm: VLM, batches: Sequence[dict[str, Tensor]], progress: Progress = silent
) -> Gradients:
    """The gradients that `store` keeps; where it has none yet, those of a pass, which it keeps then."""
    known = store.noted("gradients")
    if known is not None:
        return Gradients.from_dict(known)
    found = gradients(vlm, batches, progress)
    store.note("gradients", found.to_dict())
    return found


def kept_sensitivities(
    store: BlockFiles,
    vlm: VLM,
    blocks: Sequence[Sequence[Group]],
    batches: Sequence[dict[str, Tensor]],
    progress: Progress = silent,
) -> dict[tuple[int, str], Sensitivity]:
    """What balances by gradients read of each group of `blocks`, by block and group."""
    names = [{group.name: group.linears for group in groups} for groups in blocks]
    return sensitivities(kept_gradients(store, vlm, batches, progress), names)


def answer_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy in nats of the tokens that one sample's answer tokens predict, the next ones; mean over them."""
    inputs = {key: value for key, value in batch.items() if key != "modality"}
    target = (batch["modality"][0, :-1] == ANSWER).nonzero().squeeze(1)
    logits = model(**inputs, use_cache=False, logits_to_keep=target).logits[0]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide, batch["input_ids"][0, target + 1])


class _Total:
    """Sums of one layer over samples, by modality: of sample means of magnitudes, of tokens' squares; samples, tokens."""

    def __init__(self) -> None:
        self.sums = torch.zeros(len(MODALITIES), 4, dtype=torch.float64)

    def add(self, sums: Tensor, tokens: Tensor) -> None:
        """Add a sample: `sums [modalities, 2]` of magnitudes and squares over `tokens [modalities]`."""
        present = tokens > 0
        magnitude = sums[:, 0] / tokens.clamp_min(1)
        self.sums += torch.stack([magnitude, sums[:, 1], present, tokens], 1)

    def mean(self, channels: int) -> Gradient:
        """The means, of those modalities that occurred."""
        rows = {name: row for name, row in zip(MODALITIES, self.sums.tolist(), strict=True) if row[3]}
        return Gradient(
            channels,
            {name: row[0] / row[2] for name, row in rows.items()},
            {name: row[1] / row[3] for name, row in rows.items()},
        )


def _watch(name: str, seen: dict[str, Tensor], mask: Callable[[], Tensor]) -> Callable:
    """A forward hook that has the gradient at a layer's output reduced to sums over modalities `[4, 2]` in `seen`."""

    def reduce(grad: Tensor) -> None:
        rows = grad.detach().reshape(-1, grad.shape[-1]).float()
        magnitude, square = rows.abs().mean(1), rows.square().mean(1)
        values = torch.stack([magnitude, square], 1)
        seen[name] = values.new_zeros(1 + len(MODALITIES), 2).index_add_(0, mask().to(rows.device), values)

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(reduce)

    return hook


def _add(totals: dict[str, _Total], seen: dict[str, Tensor], mask: Tensor, scale: float, index: int) -> None:
    """Add a sample to the totals, and forget it."""
    tokens = mask.bincount(minlength=1 + len(MODALITIES))[1:].cpu()
    if missing := totals.keys() - seen.keys():
        raise UserError(f"the answer's loss does not depend on {min(missing)}; the model's decoder is not as described")
    names = list(seen)
    together = torch.stack([seen[name].cpu() for name in names]).double()
    if not together.isfinite().all():
        raise UserError(
            f"calibration sample {index}: the gradients of the answer's loss hold NaN or Inf; drop the sample"
        )
    for name, sums in zip(names, together / torch.tensor([scale, scale**2]).double(), strict=True):
        totals[name].add(sums[1:], tokens)
    seen.clear()


@contextlib.contextmanager
def _graph(vlm: VLM, checkpointed: bool) -> Iterator[None]:
    """Let the graph begin at the input of the first decoder block, and let each block keep no more of it than its input."""
    blocks = [vlm.model.get_submodule(name) for name in models.decoder_layers(vlm.model, vlm.spec)]
    root = blocks[0].register_forward_pre_hook(_begin)
    try:
        for block in blocks if checkpointed else ():
            block.forward = _checkpointed(block.forward)
        yield
    finally:
        root.remove()
        for block in blocks:
            block.__dict__.pop("forward", None)


def _begin(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return (args[0].detach().requires_grad_(), *args[1:])


def _checkpointed(forward: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda: forward(*args, **kwargs), use_reentrant=False, preserve_rng_state=False)

    return run


@contextlib.contextmanager
def accelerated(model: Any) -> Iterator[torch.device]:
    """The model on the accelerator, if there is one: as a whole, or streamed where it is too large."""
    if not torch.accelerator.is_available():
        yield model.device
        return
    device, home = torch.accelerator.current_accelerator(), model.device
    assert device is not None
    if sum(tensor.nbytes for tensor in model.state_dict().values()) > _ROOM * torch.accelerator.get_memory_info()[0]:
        with streamed(model, device):
            yield device
        return
    try:
        model.to(device)
        yield device
    finally:
        model.to(home)


@contextlib.contextmanager
def streamed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Each module's weights are on `device` while it runs, and for as long as the graph of its block is kept."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    try:
        cpu_offload(model, device, offload_buffers=True)
        yield
    finally:
        remove_hook_from_submodules(model)
