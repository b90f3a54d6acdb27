"""The inputs of a decoder's blocks, captured in one pass over the samples that runs no block.

Every block is replaced by a stub that records its arguments and returns zeros; the pass ends at the last block, before the
head. So the first block's input comes from the model's own embeddings, vision tower and projector, positions and masks are
those that the model computes, and the input of a later stub is what the model adds between two blocks (Qwen3-VL adds visual
features after the first ones). Afterwards a block can be called on its own, as often as needed, with only its own weights in
memory.

A batch has samples of similar length with the same kinds of inputs, so text alone and text with an image never share a batch.
Shorter samples are padded on the left, which keeps the distances between tokens. Positions are still those in the sample
itself, as Ministral 3 scales queries by them (`add_positions`; for M-RoPE the model derives positions from the attention
mask). Padding is masked, and its modality is `IGNORED`. Samples without an attention mask are batched only with others of the
same length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from vlmcompress import models
from vlmcompress.models import VLM, ModelSpec
from vlmcompress.models.data.encode import IGNORED, VISION, Inputs
from vlmcompress.models.devices import accelerated, float_products, sent
from vlmcompress.utils import distributed
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import error_text
from vlmcompress.utils.progress import Progress, silent

TOKENS = 2048  # most tokens of a batch, with padding, unless it is a single sample
PADDING = 1 / 8  # largest share of padding in a batch
_ROOM = 0.2  # share of an accelerator's free memory for what batches keep between two blocks


class Refused(UserError):
    """The model raises for some samples. `reasons`: number of a sample -> reason."""

    def __init__(self, reasons: dict[int, str]):
        number, why = next(iter(reasons.items()))
        super().__init__(
            f"the model cannot take {len(reasons)} of the samples, the first is number {number + 1} ({why})"
        )
        self.reasons = reasons


class StopForward(Exception):
    """Raised by a hook to end a forward pass once everything needed is recorded."""


@dataclass
class Batch:
    """Samples that go through the blocks together.

    Attributes:
        samples: their indices.
        modality: `[samples, tokens]`, the modality of each token, on the CPU.
        home: device of the hidden states between two blocks: the accelerator while there is room, then main memory.
        hidden: input of the next block, `[samples, tokens, width]`.
        calls: for each block and for the output head, its other arguments; tensors that several blocks get are stored once.
        added: DeepStack additions after each block, as (rows of `[samples * tokens, width]`, values), or None.
    """

    samples: list[int]
    modality: Tensor
    home: torch.device
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    calls: list[tuple[tuple, dict[str, Any]]] = field(default_factory=list)
    added: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)

    def set_hidden(self, hidden: Tensor) -> None:
        """Set the input of the next block."""
        self.hidden = hidden.to(self.home)

    def run_block(self, block: Callable[..., Any], layer: int, device: torch.device) -> Tensor:
        """Run a block on `device`; returns the input of the next block."""
        args, kwargs = self.calls[layer]
        args, kwargs, hidden = tree_map_only(Tensor, lambda tensor: sent(tensor, device), (args, kwargs, self.hidden))
        output = block(hidden, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        if (deepstack := self.added[layer]) is not None:
            output.flatten(0, 1).index_add_(0, *(sent(tensor, device) for tensor in deepstack))
        return output


@torch.no_grad()
def capture_block_inputs(vlm: VLM, samples: Sequence[dict[str, Tensor]], progress: Progress = silent) -> list[Batch]:
    """Make batches with the input of the first block, ready to run through all blocks; with several workers, this worker's
    share.

    Args:
        samples: from `encode`, one sample each.
        progress: called with (label, done, total).

    Raises:
        Refused: the model's code raises for some of a batch.
    """
    paths = models.decoder_layers(vlm.model, vlm.spec)
    batches: list[Batch] = []
    last = len(paths) - 1
    with _stubs(vlm.model, paths, lambda *call: recorder.record(batches[-1], *call)), accelerated(vlm.model) as device:
        recorder = _Recorder(device, last)

        def run(rows: list[int]) -> None:
            inputs = collate([samples[row] for row in rows])
            batches.append(Batch(rows, inputs.pop("modality").cpu(), device))
            add_positions(inputs, vlm.spec)
            inputs = {key: sent(value, device) for key, value in inputs.items()}
            with suppress(StopForward), float_products(vlm.model):
                vlm.model(**inputs, use_cache=False)

        chosen = distributed.shard(bucket_by_length(samples))
        for done, rows in enumerate(chosen, start=1):
            try:
                run(rows)
            except (UserError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever the model's code raises
                if reasons := _alone(run, rows, [row for others in chosen for row in others]):
                    raise Refused(reasons) from error
                raise
            batches[-1].added.append(None)  # nothing is added after the last block
            batches[-1].calls.append(((), {}))  # and the output head, which follows it, has no other arguments
            batches[-1].added.append(None)
            progress("capturing block inputs", done, len(chosen))
    return batches


def _alone(run: Callable[[list[int]], None], rows: Sequence[int], every: Sequence[int]) -> dict[int, str]:
    """Samples of a batch for which the model raises when run alone -> reason; empty where it raises for every sample tried."""
    reasons, tried = dict[int, str](), [*rows, *[row for row in every if row not in rows][:3]]
    for row in tried:
        try:
            run([row])
        except Exception as error:
            reasons[row] = f"{type(error).__name__}: {error_text(error)}"
    return {} if len(reasons) == len(tried) else {row: why for row, why in reasons.items() if row in rows}


class _Recorder:
    """Stores the arguments of a model's blocks in batches, on the accelerator while there is room, then in main memory."""

    def __init__(self, device: torch.device, last: int):
        """Args: `last`: number of the last block, at which the model's forward pass ends."""
        self.device, self.last = device, last
        self.room = 0.0 if device.type == "cpu" else _ROOM * torch.accelerator.get_memory_info()[0]
        self.zeros, self.version = torch.empty(0), 0  # what the block before returned, and its version then
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # for the current batch: id -> the tensor and its stored copy

    def record(self, batch: Batch, layer: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Store a block's arguments, and of the first block its hidden states, of others what was added to zeros; return
        zeros."""
        if layer == 0:
            self.kept.clear()
            batch.hidden = self._keep(hidden)
            batch.home = batch.hidden.device
        # torch counts in-place writes in `_version`: a model may add to a block's output in place.
        elif hidden is self.zeros and hidden._version == self.version:  # unchanged: nothing was added
            batch.added.append(None)
        else:
            # Stubs return zeros, so `hidden` is exactly what the model added: stored as its nonzero rows.
            rows = hidden.flatten(0, 1)
            index = rows.any(1).nonzero().squeeze(1)
            batch.added.append((self._keep(index), self._keep(rows[index])) if len(index) else None)
        batch.calls.append(tree_map_only(Tensor, self._keep, (args, kwargs)))
        if layer == self.last:
            self.kept.clear()
            raise StopForward
        self.zeros = torch.zeros_like(hidden)
        self.version = self.zeros._version
        return self.zeros

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if id(tensor) not in self.kept:  # positions and masks are one tensor for all blocks, stored once
            fits = tensor.nbytes <= self.room
            self.room -= tensor.nbytes if fits else 0
            self.kept[id(tensor)] = tensor, tensor if fits else tensor.cpu()
        return self.kept[id(tensor)][1]


class _Stub(nn.Module):
    """Takes the place of a decoder block and exposes its attributes."""

    def __init__(self, block: nn.Module, layer: int, note: Callable[..., Tensor]):
        super().__init__()
        # Past `nn.Module.__setattr__`, which would make the block a child and move its weights with the stub.
        self.__dict__.update(_block=block, _layer=layer, _tell=note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self._tell(self._layer, hidden_states, args, kwargs)
        return output


@contextmanager
def _stubs(model: nn.Module, paths: Sequence[str], note: Callable[..., Tensor]) -> Iterator[None]:
    blocks = {path: model.get_submodule(path) for path in paths}
    try:
        for layer, (path, block) in enumerate(blocks.items()):
            model.set_submodule(path, _Stub(block, layer, note))
        yield
    finally:
        for path, block in blocks.items():
            model.set_submodule(path, block)


def bucket_by_length(samples: Sequence[Inputs], tokens: int = TOKENS) -> list[list[int]]:
    """Indices of the samples of each batch, shortest first.

    Args:
        samples: from `encode`, one sample each.
        tokens: most tokens of a batch, with padding; a longer sample runs alone.
    """
    order = sorted(range(len(samples)), key=lambda index: (repr(_kind(samples[index])), _length(samples[index]), index))
    buckets: list[list[int]] = []
    for index in order:
        length = _length(samples[index])  # none in this batch is longer
        if buckets and _kind(samples[buckets[-1][0]]) == _kind(samples[index]):
            all_tokens = (len(buckets[-1]) + 1) * length
            unpadded = length + sum(_length(samples[other]) for other in buckets[-1])
            if all_tokens <= tokens and all_tokens - unpadded <= PADDING * all_tokens:
                buckets[-1].append(index)
                continue
        buckets.append([index])
    return buckets


def collate(samples: Sequence[Inputs]) -> Inputs:
    """Join samples of one batch of `bucket_by_length`, padded on the left to the length of the longest."""
    length = max(map(_length, samples))
    padded = [_padded(sample, length) for sample in samples]
    return {key: torch.cat([row[key] for row in padded], _rows(key, value)) for key, value in samples[0].items()}


def add_positions(inputs: Inputs, spec: ModelSpec) -> None:
    """Add each token's position, not counting padding, to a batch of a model that would otherwise count padding."""
    if spec.images.positions == "1d" and "attention_mask" in inputs and "position_ids" not in inputs:
        inputs["position_ids"] = inputs["attention_mask"].cumsum(1).sub(1).clamp(min=0)


def _length(sample: Inputs) -> int:
    return sample["modality"].shape[1]


def _kind(sample: Inputs) -> list[tuple[object, ...]]:
    """What the samples of a batch must have in common: names, types and shapes of inputs, without axes that vary by sample."""
    length, masked = _length(sample), "attention_mask" in sample
    kind: list[tuple[object, ...]] = [("tokens", 0 if masked else length)]
    for key, value in sorted(sample.items()):
        shape = list(value.shape)
        if (axis := _tokens(key, value, length)) is not None:
            shape[axis] = 0
        else:
            shape[_rows(key, value)] = 0
        kind.append((key, value.dtype, *shape))
    return kind


def _tokens(key: str, value: Tensor, length: int) -> int | None:
    """The axis of an input that counts the sample's tokens; None where it has none."""
    if key == "position_ids":
        return value.ndim - 1
    return 1 if value.shape[:2] == (1, length) else None


def _rows(key: str, value: Tensor) -> int:
    """The axis along which inputs of several samples are concatenated: samples, images, or patches."""
    if key == "position_ids":
        return value.ndim - 2
    return 1 if key == "deepstack_visual_embeds" else 0  # [levels, patches, width]


def _padded(sample: Inputs, length: int) -> Inputs:
    sample_length = _length(sample)
    if sample_length == length:
        return sample
    ids, modality = sample["input_ids"], sample["modality"]
    # Padding uses a valid id, but not an image's, as the model counts those.
    fill = {"input_ids": int(ids[modality != VISION][0]), "modality": IGNORED}  # the id of no image

    def wide(key: str, value: Tensor) -> Tensor:
        axis = _tokens(key, value, sample_length)
        if axis is None:
            return value
        return pad(value, (0, 0) * (value.ndim - 1 - axis) + (length - sample_length, 0), value=fill.get(key, 0))

    return {key: wide(key, value) for key, value in sample.items()}
