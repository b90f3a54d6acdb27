"""What a decoder's blocks are given: recorded in one pass over the samples, in which no block is run.

Every block is replaced by a stub that notes its arguments and puts out zeros. So the first one's input comes of the model's own
embeddings, vision tower and projector; positions and masks are those that the model computes; and what arrives at a later block
is what the model adds between two of them (Qwen3-VL adds visual features behind the first ones). From there on a block can be
called by itself, as often as needed, with no more than its own weights in memory.

Samples of like length run together (`calibration.batching`).
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vlmcompress import models
from vlmcompress.calibration.batching import add_positions, batched, together
from vlmcompress.calibration.devices import accelerated
from vlmcompress.calibration.float_products import float_products
from vlmcompress.common import distributed
from vlmcompress.common.progress import Progress, silent
from vlmcompress.models import VLM

_ROOM = 0.2  # share of an accelerator's free memory that hidden states between two blocks may take


@dataclass
class Batch:
    """Samples that go through the blocks together.

    Attributes:
        samples: which they are.
        modality: `[samples, tokens]` of each token, on the CPU.
        home: where hidden states stay between two blocks.
        hidden: input of the next block, `[samples, tokens, width]`.
        calls: for each block, its arguments besides that.
        added: for each block, which rows of its output `[samples * tokens, width]` the model adds to, and what; None: none.
    """

    samples: list[int]
    modality: Tensor
    home: torch.device
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    calls: list[tuple[tuple, dict[str, Any]]] = field(default_factory=list)
    added: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)

    def twin(self) -> Batch:
        """The same tokens on a way of their own: through blocks with other weights, beside this batch.

        What blocks hand on to later ones (keys and values, in Gemma 4 by a `UserDict` that they share) is its own, too.
        """
        own: dict[int, Any] = {}
        return replace(
            self, calls=tree_map_only(UserDict, lambda one: own.setdefault(id(one), UserDict(one)), self.calls)
        )

    def take(self, hidden: Tensor) -> None:
        """Keep the input of the next block."""
        self.hidden = hidden.to(self.home)

    def through(
        self, block: Callable[..., Any], layer: int, device: torch.device, hidden: Tensor | None = None
    ) -> Tensor:
        """What a block on `device` makes of the batch, or of other hidden states for it, as the next one gets it."""
        args, kwargs = self.calls[layer]
        args, kwargs, hidden = tree_map_only(
            Tensor, lambda one: one.to(device), (args, kwargs, self.hidden if hidden is None else hidden)
        )
        output = block(hidden, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        if (more := self.added[layer]) is not None:
            output.flatten(0, 1).index_add_(0, *(one.to(device) for one in more))
        return output


@torch.no_grad()
def record(vlm: VLM, samples: Sequence[dict[str, Tensor]], progress: Progress = silent) -> list[Batch]:
    """Batches with the input of the first block, ready to go through all of them; of several workers, this one's share.

    Args:
        samples: from `encode`, one sample each.
        progress: called with (label, done, total).
    """
    paths = models.decoder_layers(vlm.model, vlm.spec)
    found: list[Batch] = []
    with _stubs(vlm.model, paths, lambda *given: _note(found[-1], *given)), accelerated(vlm.model) as device:
        chosen = distributed.shard(batched(samples))
        home = _home(vlm, samples, device)
        for done, rows in enumerate(chosen, start=1):
            inputs = together([samples[row] for row in rows])
            found.append(Batch(rows, inputs.pop("modality").cpu(), home))
            add_positions(inputs, vlm.spec)
            inputs = {key: value.to(device) for key, value in inputs.items()}
            with float_products(vlm.model):
                vlm.model(**inputs, use_cache=False, logits_to_keep=1)
            found[-1].added.append(None)  # nothing comes behind the last block
            progress("capturing block inputs", done, len(chosen))
    return found


def _home(vlm: VLM, samples: Sequence[dict[str, Tensor]], device: torch.device) -> torch.device:
    """Where hidden states of all samples have room: on the accelerator, or else in main memory."""
    if device.type == "cpu":
        return device
    embeddings: Any = vlm.model.get_input_embeddings()
    width = embeddings.weight.shape[1]
    needed = sum(one["modality"].numel() for one in samples) * width * vlm.model.dtype.itemsize
    return device if needed < _ROOM * torch.accelerator.get_memory_info()[0] else torch.device("cpu")


def _note(batch: Batch, layer: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
    batch.calls.append((args, kwargs))
    if layer == 0:
        batch.take(hidden)
        return
    rows = hidden.flatten(0, 1)
    index = rows.any(1).nonzero().squeeze(1)
    batch.added.append((index, rows[index]) if len(index) else None)


class _Stub(nn.Module):
    """Stands for a decoder block, whose attributes it shows."""

    def __init__(self, block: nn.Module, layer: int, note: Callable[..., None]):
        super().__init__()
        self.__dict__.update(_block=block, _layer=layer, _tell=note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._tell(self._layer, hidden_states, args, kwargs)
        return torch.zeros_like(hidden_states)


@contextmanager
def _stubs(model: nn.Module, paths: Sequence[str], note: Callable[..., None]) -> Iterator[None]:
    blocks = {path: model.get_submodule(path) for path in paths}
    try:
        for layer, (path, block) in enumerate(blocks.items()):
            model.set_submodule(path, _Stub(block, layer, note))
        yield
    finally:
        for path, block in blocks.items():
            model.set_submodule(path, block)
