"""Where a model is while it runs: on the accelerator, if there is one, as a whole or module by module."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_ROOM = 0.8  # share of an accelerator's free memory that weights may take


def accelerator() -> torch.device | None:
    """The accelerator of this process; None where there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


@contextlib.contextmanager
def accelerated(model: Any) -> Iterator[torch.device]:
    """The model on the accelerator, if there is one: as a whole, or streamed where it is too large."""
    device, home = accelerator(), model.device
    if device is None:
        yield home
        return
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


@contextlib.contextmanager
def resident(module: nn.Module, device: torch.device) -> Iterator[None]:
    """A module on `device` while it is worked with, and where it was before afterwards.

    What was not changed meanwhile is put back as it was: weights that are mapped from a file stay so, and take no memory.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if all(tensor.device == device for tensor in tensors):
        yield
        return
    homes = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    before = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, home, version in zip(tensors, homes, before, strict=True):
            tensor.data = home if (tensor.data_ptr(), tensor._version) == version else tensor.data.to(home.device)


def trim() -> None:
    """Give memory that is free back to the system: glibc keeps what small blocks leave between others that are in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
